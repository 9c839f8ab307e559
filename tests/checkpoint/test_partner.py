"""Copies to the next node end at once when ranks are replaced, although another rank hangs."""

import json
import socket
import struct
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from frontier_llm.checkpoint.chunk_pool import host_buffer
from frontier_llm.checkpoint.commit_barrier import Ranks
from frontier_llm.checkpoint.manager import CheckpointManager
from frontier_llm.checkpoint.pacer import Cancellation, Pacer
from frontier_llm.checkpoint.partner import PartnerFiles
from frontier_llm.checkpoint.peer_files import SECRET_BYTES, receive
from frontier_llm.errors import CheckpointError
from frontier_llm.launch.world import World
from tests.checkpoint.states import States
from tests.patience import patient

PATIENCE = timedelta(seconds=30)
HEADER = struct.Struct("!HQQ")
"""A request without the name of the file."""
SILENT = socket.create_server(("127.0.0.1", 0))
"""A rank whose kernel accepts connections, but which never answers."""


def partner_files(folder: Path, store: dist.Store, nodes: int, states: States) -> PartnerFiles:
    """Save step 1, and connect this rank to that of the node before."""
    ranks = Ranks(0, 1, store, PATIENCE)
    manager = CheckpointManager(folder, ranks, "blocking", 1)
    manager.begin(1, states.shards, {})
    manager.close()
    plan = manager.plan
    described = ["00" * 16, plan.name, plan.size, plan.chunk_bytes, plan.record(None).to_json()]
    if nodes == 2:
        store.set("checkpoint/partner/1", json.dumps([*SILENT.getsockname(), *described]))
    world = World(0, nodes, 0, 1, "host", "local", "127.0.0.1", 1)
    return PartnerFiles(plan, folder, world, ranks, Pacer(None, Cancellation()))


def received(files: PartnerFiles) -> bytes:
    """Return the content that a rank gets from the node before."""
    buffer = host_buffer(files.plan.chunk_bytes)
    chunks = files.receive(1, buffer)
    return b"".join(bytes(buffer[:size].numpy()) for buffer, size in chunks)


def test_closing_the_files_ends_threads_that_wait(tmp_path: Path) -> None:
    """One waits for an answer, the other until a reader takes what it has asked for."""
    store = dist.HashStore()
    files, errors = partner_files(tmp_path, store, 2, States(repeat=200)), []

    def wait_for_answer() -> None:
        try:
            received(files)
        except CheckpointError as error:
            errors.append(str(error))

    receiver = threading.Thread(target=wait_for_answer, daemon=True)
    receiver.start()
    host, port, secret, name, *_ = json.loads(store.get("checkpoint/partner/0"))
    asked = f"step_00000001/{name}".encode()
    request = HEADER.pack(len(asked), 0, 2**40) + asked
    with socket.create_connection((host, port)) as silent:
        silent.sendall(bytes.fromhex(secret) + request)
        silent.recv(1)
        connection, _ = SILENT.accept()
        # the secret comes first; a rank that has sent a request, too, waits for the answer
        receive(connection, memoryview(bytearray(SECRET_BYTES + HEADER.size)))
        (server,) = (t for t in threading.enumerate() if t.name == "peer reader")
        assert receiver.is_alive()
        files.close()
        for thread in (receiver, server):
            thread.join(patient(5))
            assert not thread.is_alive()
        connection.close()
    assert errors == ["the files on the disk of 127.0.0.1 cannot be read: it has ended"]


def test_a_rank_receives_the_file_of_the_node_before(tmp_path: Path) -> None:
    """The rank is its own next node."""
    files = partner_files(tmp_path, dist.HashStore(), 1, States())
    content = received(files)
    files.close()
    assert content == next(tmp_path.rglob(files.plan.name)).read_bytes()


@pytest.mark.parametrize("way", ["a flipped byte", "a short file", "another file"])
def test_a_damaged_file_is_not_received(tmp_path: Path, way: str) -> None:
    files = partner_files(tmp_path, dist.HashStore(), 1, States())
    path = next(tmp_path.rglob(files.plan.name))
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content[:-1] if way == "a short file" else content)
    if way == "another file":
        files.plan = replace(files.plan, size=files.plan.size - 4096)
    with pytest.raises(CheckpointError, match=r"chunk 0 of .* is damaged|another size"):
        received(files)
    files.close()


@pytest.mark.parametrize(
    "name", ["manifest.json", "step_00000001/other", "step_00000001/../x", "step_00000001.void/{}"]
)
def test_only_the_file_and_the_manifest_are_served(tmp_path: Path, name: str) -> None:
    files = partner_files(tmp_path, dist.HashStore(), 1, States())
    with files.connected() as connection, pytest.raises(CheckpointError, match="cannot be read"):
        connection.read(name.format(files.plan.name), 0, memoryview(bytearray(1)))
    files.close()
