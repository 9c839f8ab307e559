"""TCP ports that no other program takes between the choice of a port and its use."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port of 127.0.0.1 at which nobody listens, until the test does.

    A socket is bound to it that does not listen. The system gives such a port to no one who asks
    for any free port, but a server may bind it by its number, with SO_REUSEADDR as usual.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
