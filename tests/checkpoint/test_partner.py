"""Copies to the next node end at once when ranks are replaced, although another rank hangs."""

import json
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import xxhash

from frontier_llm.checkpoint.chunk_pool import ChunkPool
from frontier_llm.checkpoint.manager import CheckpointManager
from frontier_llm.checkpoint.pacer import Cancellation, Pacer
from frontier_llm.checkpoint.partner import PartnerFiles
from frontier_llm.errors import CheckpointError
from frontier_llm.launch.world import World
from tests.checkpoint.states import States
from tests.patience import patient

PATIENCE = timedelta(seconds=30)


def world(nodes: int) -> World:
    return World(0, nodes, 0, 1, "host", "local", "127.0.0.1", 1)


def hanging_rank() -> socket.socket:
    """Listen as a rank whose connections are accepted by its kernel, but never read."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


def test_closing_the_files_ends_threads_that_wait(
    tmp_path: Path,
) -> None:
    store, states = dist.HashStore(), States(repeat=200)
    manager = CheckpointManager(tmp_path, 0, 1, store, "blocking", 1, PATIENCE)
    manager.begin(1, states.shards, {})
    manager.close()
    plan, other = manager.plan, hanging_rank()
    record = plan.record(None).to_json()
    described = [*other.getsockname(), "00" * 16, plan.name, plan.size, plan.chunk_bytes, record]
    store.set("checkpoint/partner/1", json.dumps(described))
    files = PartnerFiles(plan, tmp_path, world(2), store, PATIENCE)
    pool = ChunkPool(2, plan.chunk_bytes, torch.device("cpu"))
    buffers = [pool.take() for _ in range(2)]
    pacer, errors = Pacer(None, Cancellation()), []

    def send() -> None:
        with files.sending(1, buffers[0], pacer):
            pass

    def receive() -> None:
        try:
            list(files.receive(1, buffers[1]).chunks())
        except CheckpointError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=work, daemon=True) for work in (send, receive)]
    for thread in threads:
        thread.start()
    host, port, secret, *_ = json.loads(store.get("checkpoint/partner/0"))
    with other.accept()[0], socket.create_connection((host, port)) as silent:
        silent.sendall(bytes.fromhex(secret) + b"1".ljust(16))
        time.sleep(patient(0.125))  # until one waits in a send, the other in a receive
        assert all(thread.is_alive() for thread in threads)
        files.close()
        for thread in threads:
            thread.join(patient(5))
        assert not any(thread.is_alive() for thread in threads)
    assert errors == ["the node before stopped sending"]


@pytest.mark.parametrize("secret", [b"", bytes(16)])
def test_a_well_formed_file_of_a_stranger_is_not_received(secret: bytes, tmp_path: Path) -> None:
    """The rank is its own next node, and the stranger is the first to connect."""
    store = dist.HashStore()
    manager = CheckpointManager(tmp_path, 0, 1, store, "blocking", 1, PATIENCE)
    manager.begin(1, States().shards, {})
    manager.close()
    plan = manager.plan
    files = PartnerFiles(plan, tmp_path, world(1), store, PATIENCE)
    pool = ChunkPool(2, plan.chunk_bytes, torch.device("cpu"))
    own, received = pool.take(), pool.take()
    assert plan.size <= plan.chunk_bytes, "one chunk"
    forged = b"A" * plan.size
    host, port, *_ = json.loads(store.get("checkpoint/partner/0"))
    with socket.create_connection((host, port)) as stranger:
        stranger.sendall(secret + b"1".ljust(16) + forged + xxhash.xxh3_128_digest(forged))
        with files.sending(1, own, Pacer(None, Cancellation())):
            chunks = files.receive(1, received).chunks()
            content = b"".join(bytes(buffer[:size].numpy()) for buffer, size in chunks)
    files.close()
    assert content == next(tmp_path.rglob(plan.name)).read_bytes()
