"""Read files of a checkpoint that lie on the disk of another node, over TCP.

A rank that sees the disk serves the files (`PeerServer`), and other ranks ask for ranges of them:
to load a checkpoint, or to copy it to the next node (`partner`). A request has the name of the
file, the offset and the number of bytes; the answer is the content or an error. The reader compares
the digests. A connection begins with a secret that the server's rank has sent to the other ranks,
so that no other program reads the files.
"""

import hmac
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from frontier_llm.errors import CheckpointError

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


_REQUEST = struct.Struct("!HQQ")
"""Length of the name, offset and number of bytes."""
_ANSWER = struct.Struct("!?Q")
"""Whether it is the content, and the number of bytes that follow."""
_REASON_BYTES = 1 << 16
"""Largest length of the reason why a server cannot read a file."""
_TIMEOUT_SECONDS = 120.0
"""How long a reader waits for a server on a node that runs."""


@dataclass(frozen=True)
class Peer:
    """The address of a server."""

    host: str
    port: int
    secret: bytes


class PeerServer:
    """Serves files until it is closed, on a thread per connection.

    `find` returns the path of a file by its name, or raises an OSError, KeyError or
    CheckpointError. `host` is the address of this host under which other ranks reach it, otherwise
    an OSError is raised.
    """

    def __init__(self, find: Callable[[str], Path], host: str) -> None:
        self._find = find
        self._listener, self._sockets = Listener(host), OpenSockets()
        self.peer = Peer(*self._listener.address, self._listener.secret)
        threading.Thread(target=self._accept, name="peer server", daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        self._sockets.shut_down()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="peer reader", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        with self._sockets.using(connection), suppress(OSError, EOFError):
            while True:
                length, offset, count = _REQUEST.unpack(_received(connection, _REQUEST.size))
                name = _received(connection, length).decode(errors="replace")
                try:
                    stream = self._find(name).open("rb")
                except (OSError, KeyError, CheckpointError) as error:
                    text = str(getattr(error, "strerror", "") or error).encode()
                    connection.sendall(_ANSWER.pack(False, len(text)) + text)
                    continue
                with stream:
                    size = os.fstat(stream.fileno()).st_size
                    left = max(0, min(count, size - offset))
                    connection.sendall(_ANSWER.pack(True, left))
                    if left:
                        connection.sendfile(stream, offset, left)


class PeerConnection:
    """A connection to a server; raises a CheckpointError if the server does not answer."""

    def __init__(self, peer: Peer, seconds: float = _TIMEOUT_SECONDS) -> None:
        self._peer = peer
        try:
            self.socket = connect((peer.host, peer.port), seconds)
            self.socket.sendall(peer.secret)
        except OSError as error:
            raise self._lost(error) from None

    def close(self) -> None:
        """End the connection."""
        self.socket.close()

    def read(self, name: str, offset: int, content: memoryview) -> int:
        """Read a range of a file; return the number of bytes, which is less at the file's end.

        A CheckpointError is raised if the server cannot read the file, or does not answer.
        """
        encoded = name.encode()
        try:
            request = _REQUEST.pack(len(encoded), offset, len(content))
            self.socket.sendall(request + encoded)
            is_content, count = _ANSWER.unpack(_received(self.socket, _ANSWER.size))
            if count > (len(content) if is_content else _REASON_BYTES):
                raise OSError(f"it announces {count} bytes")
            if is_content:
                receive(self.socket, content[:count])
                return int(count)
            reason = _received(self.socket, count).decode(errors="replace")
        except (OSError, EOFError) as error:
            raise self._lost(error) from None
        raise CheckpointError(f"{name} cannot be read by {self._peer.host}: {reason}")

    def _lost(self, error: Exception) -> CheckpointError:
        peer = self._peer
        return CheckpointError(
            f"the files on the disk of {peer.host} cannot be read: {str(error) or 'it has ended'}"
        )


def _received(connection: socket.socket, count: int) -> bytes:
    content = bytearray(count)
    receive(connection, memoryview(content))
    return bytes(content)
