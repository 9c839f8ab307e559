"""Connections that another thread shuts down while they are in use."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from frontier_llm.launch.connections import Connections


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def connect(server: socket.socket, stack: ExitStack) -> socket.socket:
    client = stack.enter_context(socket.create_connection(server.getsockname()))
    stack.enter_context(server.accept()[0])
    return client


def is_open(client: socket.socket) -> bool:
    client.settimeout(0.05)
    try:
        return client.recv(1) != b""
    except TimeoutError:
        return True


def test_only_connections_between_begin_and_seal_are_cut(server: socket.socket) -> None:
    connections = Connections(0)
    with ExitStack() as stack:
        before = connect(server, stack)
        connections.begin(1)
        own = connect(server, stack)
        connections.seal()
        later = connect(server, stack)
        assert not connections.cut(before=1), "the generation itself is not over"
        assert is_open(own)
        assert connections.cut(before=2)
        assert not is_open(own)
        assert is_open(before)
        assert is_open(later)
        connections.end()
        assert not connections.cut(before=3)
    assert server.fileno() != -1


def test_before_seal_everything_new_is_cut_but_no_listening_socket(server: socket.socket) -> None:
    connections = Connections(0)
    connections.begin(0)
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        own = connect(server, stack)
        assert connections.cut(before=1)
        assert not is_open(own)
        assert is_open(connect(listening, stack))


def test_a_thread_that_waits_for_a_message_is_woken(server: socket.socket) -> None:
    connections = Connections(0)
    connections.begin(0)
    with ExitStack() as stack:
        client = connect(server, stack)
        received: list[bytes] = []
        thread = threading.Thread(target=lambda: received.append(client.recv(1)))
        thread.start()
        time.sleep(0.05)
        connections.cut(before=1)
        thread.join(5)
        assert received == [b""]


def test_after_seal_a_connection_to_the_store_is_cut(server: socket.socket) -> None:
    connections = Connections(server.getsockname()[1])
    connections.begin(0)
    connections.seal()
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as other:
        to_store, elsewhere = connect(server, stack), connect(other, stack)
        assert connections.cut(before=1)
        assert not is_open(to_store)
        assert is_open(elsewhere)
