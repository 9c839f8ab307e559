"""Connections of strangers to the sockets of a rank: they delay, reserve and change nothing."""

import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from frontier_llm.checkpoint import peer_files
from frontier_llm.checkpoint.peer_files import Listener
from tests.patience import patient


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener("127.0.0.1")
    yield made
    made.close()


def connected(listener: Listener, content: bytes) -> socket.socket:
    """Connect and send some bytes."""
    connection = socket.create_connection(listener.address)
    connection.sendall(content)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end closes a connection."""
    connection.settimeout(patient(5))
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_it_listens_only_on_its_address(listener: Listener) -> None:
    port = listener.address[1]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))


def test_strangers_do_not_delay_a_rank(listener: Listener) -> None:
    garbage = [b"", b"7".ljust(16), b"GET / HTTP/1.1\r\n" * 9, bytes(16) + b"7".ljust(16)]
    strangers = [connected(listener, content) for content in garbage * 10]
    with connected(listener, listener.secret + b"content"):
        begin = time.monotonic()
        with listener.accept() as accepted:
            assert accepted.recv(7) == b"content"
        assert time.monotonic() - begin < patient(1)
    for stranger in strangers:
        stranger.close()


def test_a_greeting_that_came_while_nobody_waited_is_read(listener: Listener) -> None:
    with connected(listener, listener.secret), connected(listener, listener.secret):
        listener.accept().close()
        (other,) = listener._new
        listener._new[other] = 0.0, b""  # its deadline was long ago
        listener.accept().close()


def test_a_process_without_descriptors_accepts_later(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "none left")] * 2

    def failing(self: socket.socket) -> tuple[socket.socket, Any]:
        if failures:
            raise failures.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", failing)
    with connected(listener, listener.secret):
        listener.accept().close()
    assert not failures


def test_a_greeting_may_come_in_parts(listener: Listener) -> None:
    with connected(listener, listener.secret[:5]) as connection:
        threading.Timer(0.1, connection.sendall, [listener.secret[5:] + b"x"]).start()
        with listener.accept() as accepted:
            accepted.settimeout(patient(5))
            assert accepted.recv(1) == b"x"


def test_silent_connections_are_closed(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_files, "_GREETING_SECONDS", 0.1)
    with connected(listener, b"x") as silent:
        closed: list[bool] = []

        def close_later() -> None:
            with suppress(TimeoutError):
                closed.append(is_closed(silent))
            listener.close()

        threading.Thread(target=close_later).start()
        with pytest.raises(OSError, match="was closed"):
            listener.accept()
        assert closed == [True]


def test_at_most_so_many_greetings_are_awaited(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_files, "_GREETINGS", 4)
    silent = [connected(listener, b"") for _ in range(9)]
    with connected(listener, listener.secret), listener.accept():
        assert all(map(is_closed, silent[:5]))
    for connection in silent:
        connection.close()


def test_closing_wakes_the_thread_that_waits(listener: Listener) -> None:
    errors = []

    def wait() -> None:
        try:
            listener.accept()
        except OSError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    listener.close()
    thread.join(patient(5))
    assert errors == ["the listener was closed"]


def assert_loss_is_noticed(connection: socket.socket) -> None:
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 10


def test_the_loss_of_a_node_is_noticed_by_the_rank_that_accepted(listener: Listener) -> None:
    with (
        connected(listener, listener.secret),
        listener.accept() as accepted,
    ):
        assert_loss_is_noticed(accepted)


def test_a_receiver_that_does_not_read_is_not_lost(listener: Listener) -> None:
    """Its kernel answers, so that only the limit of the program ends the connection."""
    connection = peer_files.connect(listener.address, 60.0)
    with connection:
        assert_loss_is_noticed(connection)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
