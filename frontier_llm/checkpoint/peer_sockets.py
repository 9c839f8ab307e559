"""Connections between ranks of different nodes, which another thread can end while they are in use.

A node that loses its power closes no connection. Without the limits here, a thread would wait for
it as long as for a rank that is only slow.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CONNECT_SECONDS = 10.0
"""How long a rank waits until the kernel of another node has accepted a connection."""
_SILENCE_SECONDS = 10
"""A node whose kernel does not answer for this long is lost."""
_KEEPALIVE_SECONDS = 3
"""Interval at which the kernel asks a silent node for an answer."""


class OpenSockets:
    """The sockets that the threads of one object use."""

    def __init__(self) -> None:
        self._lock, self._is_over = threading.Lock(), False
        self._sockets: set[socket.socket] = set()

    @contextmanager
    def using(self, connection: socket.socket) -> Iterator[socket.socket]:
        """Let `shut_down` end a connection while the context is active; close it afterwards."""
        with self._lock:
            self._sockets.add(connection)
            if self._is_over:
                _shut_down(connection)
        try:
            yield connection
        finally:
            with self._lock:
                self._sockets.discard(connection)
            connection.close()

    def shut_down(self) -> None:
        """Make all operations on these sockets fail, now and later; any thread calls this."""
        with self._lock:
            self._is_over = True
            for connection in self._sockets:
                _shut_down(connection)


def connect(address: tuple[str, int], seconds: float) -> socket.socket:
    """Connect to a rank of another node.

    Args:
        address: host and port.
        seconds: time limit of each later operation. The loss of the node is noticed earlier.

    Raises:
        OSError: the node does not answer.
    """
    connection = socket.create_connection(address, min(seconds, _CONNECT_SECONDS))
    connection.settimeout(seconds)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS),
            (socket.TCP_KEEPINTVL, _KEEPALIVE_SECONDS),
            (socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_SECONDS),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):  # not connected any more
        connection.shutdown(socket.SHUT_RDWR)
