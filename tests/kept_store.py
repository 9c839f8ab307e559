"""A key-value store that a process of its own holds.

A TCPStore that is the master has a thread, which asks the resolver of the C library for names. A
process that is forked at that moment could never ask it again.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from frontier_llm.membership.launcher import keep_store
from tests.forked_train import Forked


@contextmanager
def kept_store() -> Iterator[int]:
    """Hold a TCPStore; yield its port on 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        keeper = Forked(partial(keep_store, server))
        try:
            yield server.getsockname()[1]
        finally:
            keeper.kill()
            keeper.wait()
