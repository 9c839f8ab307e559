"""The network connections of this process, which another thread can end while they are in use.

gloo cannot abort a collective: `abort` does nothing, and destroying a group waits for its timeout.
If its sockets are shut down, a collective that waits for a dead rank fails at once.
"""

import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

_ANSWER_SECONDS = 0.2


class Connections:
    """The TCP connections that this process has opened for one purpose.

    Connections that existed before `begin` are never touched. Of those that were opened after
    `seal`, only connections to the job's store are counted. Those of other libraries (a tracker of
    experiments) thus stay open.
    """

    def __init__(self, store_port: int) -> None:
        self._store_port = store_port
        self._lock = threading.Lock()
        self._before: set[int] = set()
        self._own: set[int] | None = None
        self._generation: int | None = None

    def begin(self, generation: int) -> None:
        """Count connections that are opened from now on, for this generation."""
        with self._lock:
            self._before, self._own = {inode for inode, _ in _sockets()}, None
            self._generation = generation

    def seal(self) -> None:
        """Count no further connections but those to the store."""
        with self._lock:
            self._own = {inode for inode, _ in _sockets()} - self._before

    def end(self) -> None:
        """Forget the connections, so that `cut` does nothing until the next `begin`."""
        with self._lock:
            self._generation = None

    def are_used(self, before: int) -> bool:
        """Return whether the main thread uses connections of a generation before this one."""
        return self._generation is not None and self._generation < before

    def cut(self, before: int) -> bool:
        """Shut down the counted connections of a generation before this one, if there are any.

        Returns whether there are. May be called from any thread. A connection that is being opened
        may escape, so the caller repeats the call until the thread that uses the connections has
        called `end`.
        """
        with self._lock:
            if not self.are_used(before):
                return False
            for inode, descriptor in _sockets():
                if inode in self._before:
                    continue
                is_late = self._own is not None and inode not in self._own
                _shut_down(inode, descriptor, self._store_port if is_late else None)
            return True

    def answer(self, before: int, size: int) -> None:
        """In place of the ranks that gloo waits for, connect to this process and close at once.

        While gloo connects a group of `size` ranks, in a generation before `before`, it waits a
        whole time limit for each rank that does not come: it listens, so that there is no
        connection yet that `cut` could shut down. A connection begins with the number of the pair
        of ranks (gloo/transport/tcp/listener.cc).
        """
        with self._lock:
            if not self.are_used(before):
                return
            found = [
                _listening_address(inode, descriptor)
                for inode, descriptor in _sockets()
                if inode not in self._before
            ]
        for address, pair in product(filter(None, found), range(size)):
            with (
                suppress(OSError),
                socket.create_connection(address, _ANSWER_SECONDS) as connection,
            ):
                connection.sendall(struct.pack("=q", pair))


def _listening_address(inode: int, descriptor: int) -> tuple[str, int] | None:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        if _is_tcp(copy, inode) and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            address, port = copy.getsockname()[:2]
            return str(address), int(port)
    return None


def limit_silence(port: int, seconds: float) -> None:
    """Let the connections to a port fail if the other side's machine is silent for some time.

    Otherwise an operation of the store that waits for an answer of a node that has lost its power
    fails after a quarter of an hour. A machine answers although the process that has opened the
    port is busy. Does nothing if the system is not Linux.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    for inode, descriptor in _sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            if _is_tcp(copy, inode) and copy.getpeername()[1] == port:
                copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))


def _sockets() -> Iterator[tuple[int, int]]:
    """Yield (inode, descriptor) of each socket of this process."""
    for path in Path("/dev/fd").iterdir():
        try:
            status = os.fstat(int(path.name))
        except OSError:
            continue  # closed meanwhile
        if stat.S_ISSOCK(status.st_mode):
            yield status.st_ino, int(path.name)


def _is_tcp(copy: socket.socket, inode: int) -> bool:
    """Return whether a copy of a descriptor belongs to the expected socket, and this is of TCP.

    A process also has other sockets: srun may leave it one of a Unix domain, for example.
    """
    is_same = os.fstat(copy.fileno()).st_ino == inode
    is_internet = copy.family in (socket.AF_INET, socket.AF_INET6)
    return is_same and is_internet and copy.type == socket.SOCK_STREAM


def _shut_down(inode: int, descriptor: int, port: int | None) -> None:
    """Shut a TCP connection to a port down, unless its descriptor has another use by now."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:  # may be closed
        is_listening = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if _is_tcp(copy, inode) and not is_listening:
            if port is None or copy.getpeername()[1] == port:
                copy.shutdown(socket.SHUT_RDWR)
