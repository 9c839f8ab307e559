"""Read files of a checkpoint that lie on the disk of another node, over TCP.

A rank that sees the disk serves the files (`PeerServer`), and other ranks ask for ranges of them:
to load a checkpoint, or to copy it to the next node (`partner`). A request has the name of the
file, the offset and the number of bytes; the answer is the content or an error. The reader compares
the digests. A connection begins with a secret that the server's rank has sent to the other ranks,
so that no other program reads the files.
"""

import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from frontier_llm.checkpoint.peer_sockets import Listener, OpenSockets, connect, receive
from frontier_llm.errors import CheckpointError

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
