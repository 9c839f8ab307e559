"""Send this rank's file of a node-local checkpoint to a rank of the next node, and receive one.

Ranks use TCP connections of their own, because collectives belong to the main thread and the store
is for small values. A connection carries one file: the receiver's secret and the step, then for
each chunk (the part of a file that has one digest) its content and its digest. The sender has
compared the digest with the content that it read, and the receiver with what it received.
"""

import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from frontier_llm.checkpoint.drain import open_when_committed
from frontier_llm.checkpoint.manifest import FilePart, RankRecord
from frontier_llm.checkpoint.pacer import Pacer
from frontier_llm.checkpoint.peer_sockets import Listener, OpenSockets, connect, receive
from frontier_llm.checkpoint.range_reader import RangeReader, chunk_ranges
from frontier_llm.checkpoint.write_plan import PAGE_BYTES, FilePlan, WritePlan
from frontier_llm.errors import CheckpointError
from frontier_llm.launch.world import World

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_log = logging.getLogger(__name__)
_STEP_BYTES, _DIGEST_BYTES = 16, 16
_RANGE_BYTES = 4096
"""Bytes of a range besides its elements, at most: its entry in the header, and padding."""
_KEY = "checkpoint/partner"


def _checked_plan(
    own_chunk_bytes: int, name: str, size: int, chunk_bytes: int, record: str
) -> FilePlan:
    """Return the layout of a file from what another rank says of it.

    Raises a ValueError if it is too large, or its chunks are not those of this rank.
    """
    tensors = RankRecord.model_validate_json(record).tensors
    RankRecord(  # checks the name and the size
        files={name: FilePart(size=size, chunks=(), offset_bytes=0)}, tensors={}
    )
    if chunk_bytes != own_chunk_bytes:
        raise ValueError(f"chunks of {chunk_bytes} bytes instead of {own_chunk_bytes}")
    ranges = [r for tensor in tensors.values() for r in tensor.stored_ranges]
    stored = sum((4 * r.count + _RANGE_BYTES) * len(r.keys) for r in ranges)
    if size > stored + 2 * PAGE_BYTES:
        raise ValueError(f"a file of {size} bytes for ranges of {stored} bytes")
    return FilePlan(name, 0, size, None, chunk_bytes, tensors)


class PartnerFiles:
    """Sends this rank's file to a rank of the next node, and receives one from the node before.

    The constructor is collective over all ranks: they exchange layouts and addresses through the
    store. It raises a CheckpointError if another rank does not answer, or this host has no
    address for it. `plan` is the layout of the file that this rank receives.
    """

    def __init__(
        self,
        plan: WritePlan,
        folder: Path,
        world: World,
        store: "Store",
        timeout: timedelta,
    ) -> None:
        self._plan, self._folder, self._timeout = plan, folder, timeout
        self._seconds, self._sockets = timeout.total_seconds(), OpenSockets()
        receiver = (world.rank + world.ranks_per_node) % world.size
        sender = (world.rank - world.ranks_per_node) % world.size
        try:
            self._listener = Listener(own_address(world.master_address))
        except OSError as error:
            raise CheckpointError(f"no rank can connect to this host: {error}") from None
        address = *self._listener.address, self._listener.secret.hex()
        record = plan.record(None).to_json()
        text = json.dumps([*address, plan.name, plan.size, plan.chunk_bytes, record])
        store.set(f"{_KEY}/{world.rank}", text)
        keys = [f"{_KEY}/{sender}", f"{_KEY}/{receiver}"]
        try:
            store.wait(keys, timeout)
            described, receiving = (json.loads(text) for text in store.multi_get(keys))
        except RuntimeError as error:
            raise CheckpointError(f"a rank of another node does not answer: {error}") from None
        try:
            self._address = str(receiving[0]), int(receiving[1])
            self._secret = bytes.fromhex(receiving[2])
            self.plan = _checked_plan(plan.chunk_bytes, *described[3:])
        except (ValueError, TypeError, IndexError) as error:
            raise CheckpointError(f"rank {sender} describes its file wrongly: {error}") from None

    @contextmanager
    def sending(self, step: int, buffer: torch.Tensor, pacer: Pacer) -> Iterator[None]:
        """Send this rank's file while the context is active. A failure is only logged.

        The receiver notices a failure and aborts the copy on all ranks. The buffer is [chunk_bytes]
        uint8, page-aligned.
        """
        thread = threading.Thread(
            target=self._send, args=(step, buffer, pacer), name="partner", daemon=True
        )
        if self._plan.size:
            thread.start()
        try:
            yield
        finally:
            if self._plan.size:
                thread.join()

    def receive(self, step: int, buffer: torch.Tensor) -> "ReceivedChunks":
        """Return the content of the file of the node before; the buffer is as for `sending`."""
        return ReceivedChunks(self, step, buffer)

    @contextmanager
    def accepting(self, step: int) -> Iterator[socket.socket]:
        """Accept the connection for a step; those of earlier steps, which failed, are closed."""
        greeting = _greeting(self._listener.secret, step)
        try:
            connection = self._listener.accept(greeting, self._seconds)
        except OSError as error:
            raise CheckpointError(f"the node before does not send: {error}") from None
        with self._sockets.using(connection):
            yield connection

    def close(self) -> None:
        """Stop to listen, and end all connections. Threads that wait for other ranks fail."""
        self._sockets.shut_down()
        self._listener.close()

    def _send(self, step: int, buffer: torch.Tensor, pacer: Pacer) -> None:
        try:
            pacer.start_thread()
            checkpoint = open_when_committed(self._folder, step, self._timeout, pacer.cancellation)
            with (
                self._sockets.using(connect(self._address, self._seconds)) as connection,
                RangeReader(checkpoint, verify=True) as reader,
            ):
                connection.sendall(_greeting(self._secret, step))
                for range_ in chunk_ranges(checkpoint, self._plan.name):
                    pacer.wait(range_.stop - range_.start)
                    content = reader.read(range_, buffer).numpy().data
                    connection.sendall(content)
                    connection.sendall(xxhash.xxh3_128_digest(content))
        except (OSError, CheckpointError) as error:
            _log.warning("step %d was not sent to the next node: %s", step, error)


class ReceivedChunks:
    """The chunks of a file that a rank of the node before sends."""

    def __init__(self, files: PartnerFiles, step: int, buffer: torch.Tensor) -> None:
        self._files, self._step, self._buffer = files, step, buffer

    def chunks(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the chunks; raise a CheckpointError if one is late or does not match its digest."""
        plan = self._files.plan
        content, digest = self._buffer.numpy().data, memoryview(bytearray(_DIGEST_BYTES))
        with self._files.accepting(self._step) as connection:
            for index in range(plan.chunk_count):
                size = plan.chunk_size(index)
                try:
                    receive(connection, content[:size])
                    receive(connection, digest)
                except (OSError, EOFError) as error:
                    why = f": {error}" if str(error) else ""
                    raise CheckpointError(f"the node before stopped sending{why}") from None
                if xxhash.xxh3_128_digest(content[:size]) != digest:
                    raise CheckpointError(f"chunk {index} of {plan.name} was damaged on its way")
                yield self._buffer, size

    def close(self) -> None:
        """Do nothing: the buffer belongs to the caller."""


def _greeting(secret: bytes, step: int) -> bytes:
    return secret + str(step).encode().ljust(_STEP_BYTES)


def own_address(master: str) -> str:
    """Return the address of the interface of this host through which rank 0 is reached."""
    family = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family[0], socket.SOCK_DGRAM) as probe:
        probe.connect(family[4])  # sends nothing
        return str(probe.getsockname()[0])
