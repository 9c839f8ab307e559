"""Connections that another thread shuts down while they are in use."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial

import pytest

from frontier_llm.membership.connections import Connections, limit_silence
from tests.forked_train import Forked
from tests.kept_store import kept_store
from tests.patience import patient


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
        thread.join(patient(5))
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


GLOO_SECONDS = 300


def connect_with_a_rank_that_leaves(rank: int, port: int) -> int:
    """Connect a group of six ranks, of which rank 1 ends meanwhile; return whether all wait."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store, own = (
        dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False) for _ in range(2)
    )
    connections = Connections(port)
    connections.begin(0)

    def disturb() -> None:
        own.wait(["0//cpu//0/1"])  # rank 1 has told the others where it listens
        if rank == 1:
            os._exit(99)
        time.sleep(1)
        while connections.cut(before=1):  # on a busy machine gloo may not be waiting yet
            connections.answer(before=1, size=6)
            time.sleep(0.3)

    threading.Thread(target=disturb, daemon=True).start()
    begin = time.monotonic()
    with suppress(Exception):
        limit = timedelta(seconds=GLOO_SECONDS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=6, timeout=limit)
    connections.end()
    return time.monotonic() - begin > GLOO_SECONDS / 2


@pytest.mark.slow
def test_gloo_stops_to_wait_for_a_rank_that_does_not_connect() -> None:
    with kept_store() as port:
        ranks = [Forked(partial(connect_with_a_rank_that_leaves, rank, port)) for rank in range(6)]
        codes = [rank.wait().code for rank in ranks]
    assert codes == [0, 99, 0, 0, 0, 0], "some waited until the limit of gloo"


def test_a_limit_of_silence_is_set_on_connections_to_the_port_only(server: socket.socket) -> None:
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as another:
        client, other = connect(server, stack), connect(another, stack)
        for unix in socket.socketpair():
            stack.enter_context(unix)
        limit_silence(server.getsockname()[1], 20)
        option = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
        assert client.getsockopt(*option) == 20_000
        assert other.getsockopt(*option) == 0
