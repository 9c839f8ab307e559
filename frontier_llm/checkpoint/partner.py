"""Copy this rank's file of a node-local checkpoint to a rank of the next node, and receive one.

Each rank serves its file (`peer_files`), and reads that of a rank of the node before. Collectives
belong to the main thread, and the store is for small values. The reader compares the chunks with
the digests in the manifest of the node before.
"""

import json
import socket
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash

from frontier_llm.checkpoint.commit_barrier import Ranks
from frontier_llm.checkpoint.drain import wait_until_committed
from frontier_llm.checkpoint.folders import MANIFEST, parse_folder, step_folder
from frontier_llm.checkpoint.manifest import FilePart, Manifest, RankRecord
from frontier_llm.checkpoint.pacer import Pacer
from frontier_llm.checkpoint.peer_files import OpenSockets, Peer, PeerConnection, PeerServer
from frontier_llm.checkpoint.write_plan import PAGE_BYTES, FilePlan, WritePlan
from frontier_llm.errors import CheckpointError
from frontier_llm.launch.world import World
from frontier_llm.units import MIB

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
    """Serves this rank's file to a rank of the next node, and reads that of the node before.

    The constructor is collective over all ranks: they exchange layouts and addresses through the
    store. It raises a CheckpointError if another rank does not answer, or this host has no
    address for it. `plan` is the layout of the file that this rank reads, at the pace of `pacer`.
    """

    def __init__(
        self, plan: WritePlan, folder: Path, world: World, ranks: Ranks, pacer: Pacer
    ) -> None:
        self._name, self._folder, self._timeout = plan.name, folder, ranks.timeout
        self._sockets, self._pacer = OpenSockets(), pacer
        sender = (world.rank - world.ranks_per_node) % world.size
        try:
            self._server = PeerServer(self._find, own_address(world.master_address))
        except OSError as error:
            raise CheckpointError(f"no rank can connect to this host: {error}") from None
        own, record = self._server.peer, plan.record(None).to_json()
        address = own.host, own.port, own.secret.hex()
        text = json.dumps([*address, plan.name, plan.size, plan.chunk_bytes, record])
        ranks.store.set(f"{_KEY}/{world.rank}", text)
        try:
            ranks.store.wait([f"{_KEY}/{sender}"], ranks.timeout)
            host, port, secret, *described = json.loads(ranks.store.get(f"{_KEY}/{sender}"))
        except RuntimeError as error:
            raise CheckpointError(f"a rank of another node does not answer: {error}") from None
        try:
            self._sender = Peer(str(host), int(port), bytes.fromhex(secret))
            self.plan = _checked_plan(plan.chunk_bytes, *described)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"rank {sender} describes its file wrongly: {error}") from None

    def receive(
        self, step: int, buffer: torch.Tensor
    ) -> Generator[tuple[torch.Tensor, int], None, None]:
        """Yield the chunks of the file of the node before, each as (`buffer`, size in bytes).

        The buffer is [chunk_bytes] uint8, page-aligned. A CheckpointError is raised if a chunk is
        late or does not match its digest.
        """
        plan, folder, content = self.plan, step_folder(step), buffer.numpy().data
        with self.connected() as connection:
            manifest = _read_manifest(connection, f"{folder}/{MANIFEST}")
            stored = manifest.files.get(plan.name)
            if stored is None or stored.size != plan.size:
                raise CheckpointError(f"{plan.name} of the node before has another size")
            for index, digest in enumerate(stored.chunks):
                begin, size = index * plan.chunk_bytes, plan.chunk_size(index)
                self._pacer.wait(size)
                count = connection.read(f"{folder}/{plan.name}", begin, content[:size])
                if count < size or xxhash.xxh3_128_hexdigest(content[:size]) != digest:
                    raise CheckpointError(f"chunk {index} of {plan.name} is damaged")
                yield buffer, size

    @contextmanager
    def connected(self) -> Iterator[PeerConnection]:
        """Connect to the rank of the node before, until `close`."""
        connection = PeerConnection(self._sender, self._timeout.total_seconds())
        with self._sockets.using(connection.socket):
            yield connection

    def close(self) -> None:
        """End all connections. Threads that wait for other ranks fail."""
        self._pacer.cancellation.cancel()
        self._sockets.shut_down()
        self._server.close()

    def _find(self, name: str) -> Path:
        """Return the path of STEP/FILE, which is this rank's file or the manifest of its node.

        Waits until the step is committed; raises a CheckpointError if it is not.
        """
        step, _, file = name.partition("/")
        if file not in (self._name, MANIFEST) or (parse_folder(step) or ("", "?"))[1]:
            raise KeyError(name)
        self._pacer.start_thread()
        wait_until_committed(self._folder / step, self._timeout, self._pacer.cancellation)
        return self._folder / step / file


def _read_manifest(connection: PeerConnection, name: str) -> Manifest:
    text, part = b"", bytearray(MIB)
    while count := connection.read(name, len(text), memoryview(part)):
        text += part[:count]
    return Manifest.parse(text, f"{name} of the node before")


def own_address(master: str) -> str:
    """Return the address of the interface of this host through which rank 0 is reached."""
    family = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family[0], socket.SOCK_DGRAM) as probe:
        probe.connect(family[4])  # sends nothing
        return str(probe.getsockname()[0])
