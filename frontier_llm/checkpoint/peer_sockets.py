"""Connections between ranks of different nodes, which another thread can end while they are in use.

A node that loses its power closes no connection. Without the limits here, a thread would wait for
it as long as for a rank that is only slow. Other programs may connect, too: a connection counts
only when it has begun with the bytes that ranks know from their store.
"""

import hmac
import os
import selectors
import socket
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

_CONNECT_SECONDS = 10.0
"""How long a rank waits until the kernel of another node has accepted a connection."""
_KEEPALIVE_SECONDS, _KEEPALIVE_PROBES = 3, 3
"""Interval at which the kernel asks a silent node for an answer. After this number of questions
without an answer the node is lost."""
SECRET_BYTES = 16
_GREETING_SECONDS = 2.0
_GREETINGS = 64
"""Most connections of which the greeting is awaited. If more come, the oldest is closed."""
_PAUSE_SECONDS = 0.05
"""How long a listener waits after a connection that it could not accept."""


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


class Listener:
    """Accepts the connections that begin with the secret, and closes all others.

    Raises an OSError if the address, given as a number, is not of this host. `secret` has
    [SECRET_BYTES] random bytes, which ranks learn from their store. `address` is host and port,
    under which other ranks connect.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=128)
        self._server.setblocking(False)
        _notice_loss(self._server)  # the connections that it accepts inherit this
        self._closing, self._closed = socket.socketpair()  # wakes the thread that waits
        self.secret = os.urandom(SECRET_BYTES)
        self.address: tuple[str, int] = host, self._server.getsockname()[1]
        self._new: dict[socket.socket, tuple[float, bytes]] = {}  # by age: deadline, what has come

    def accept(self) -> socket.socket:
        """Wait for a connection that begins with the secret; silent ones delay no other connection.

        Raises an OSError if the listener was closed.
        """
        try:
            while True:
                for connection in self._ready():
                    if self._has_greeted(connection):
                        del self._new[connection]
                        connection.settimeout(None)
                        return connection
        except (OSError, ValueError):  # ValueError: closed before the selector knew it
            raise OSError("the listener was closed") from None

    def close(self) -> None:
        """Stop to listen, and wake the thread that waits for a connection."""
        self._closing.close()
        self._server.close()
        for connection in tuple(self._new):
            connection.close()

    def _ready(self) -> list[socket.socket]:
        """Wait for events; accept new connections, close late ones and return those with bytes."""
        with selectors.PollSelector() as selector:  # needs no descriptor: there may be none left
            for item in (self._server, self._closed, *self._new):
                selector.register(item, selectors.EVENT_READ)
            deadline = min((deadline for deadline, _ in self._new.values()), default=None)
            wait = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            ready = [key.fileobj for key, _ in selector.select(wait)]
        if self._closed in ready:
            raise OSError
        if self._server in ready:
            try:
                connection, _ = self._server.accept()
            except OSError:  # it has ended, or this process has no descriptor left
                time.sleep(_PAUSE_SECONDS)
            else:
                connection.setblocking(False)
                self._new[connection] = time.monotonic() + _GREETING_SECONDS, b""
        self._close_some(ready)
        return [connection for connection in self._new if connection in ready]

    def _has_greeted(self, connection: socket.socket) -> bool:
        deadline, begin = self._new[connection]
        try:
            came = connection.recv(SECRET_BYTES - len(begin))
        except BlockingIOError:
            return False
        except OSError:
            came = b""
        self._new[connection] = deadline, begin + came
        if came and len(begin + came) < SECRET_BYTES:
            return False
        if hmac.compare_digest(begin + came, self.secret):
            return True
        del self._new[connection]
        connection.close()
        return False

    def _close_some(self, ready: Collection[object]) -> None:
        """Close late connections, and the oldest if there are too many.

        One with bytes is not late: it may have greeted while nobody waited for a connection.
        """
        now, too_many = time.monotonic(), max(len(self._new) - _GREETINGS, 0)
        for index, (connection, (deadline, _)) in enumerate(tuple(self._new.items())):
            if index < too_many or (now > deadline and connection not in ready):
                del self._new[connection]
                connection.close()


def connect(address: tuple[str, int], seconds: float) -> socket.socket:
    """Connect to a rank of another node; raise an OSError if it does not answer.

    `seconds` limits each later operation. A receiver notices the loss of the node earlier; a
    sender does not, as the kernel asks nothing while bytes are on their way.
    """
    connection = socket.create_connection(address, min(seconds, _CONNECT_SECONDS))
    connection.settimeout(seconds)
    _notice_loss(connection)
    return connection


def receive(connection: socket.socket, content: memoryview) -> None:
    """Fill a buffer; raise an EOFError if the connection has ended."""
    done = 0
    while done < len(content):
        count = connection.recv_into(content[done:])
        if not count:
            raise EOFError
        done += count


def _notice_loss(connection: socket.socket) -> None:
    """Let operations fail that wait for bytes of a node whose kernel does not answer."""
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        # without TCP_USER_TIMEOUT, which also ends the connection to a node whose kernel answers
        # but whose disk is slow, so that the receiver's window stays closed (tcp(7))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS),
            (socket.TCP_KEEPINTVL, _KEEPALIVE_SECONDS),
            (socket.TCP_KEEPCNT, _KEEPALIVE_PROBES),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):  # not connected any more
        connection.shutdown(socket.SHUT_RDWR)
