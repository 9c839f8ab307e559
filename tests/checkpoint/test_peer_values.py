"""What other ranks announce is compared with what is expected, before memory is reserved."""

import json
import socket
import struct
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from frontier_llm.checkpoint.commit_barrier import Ranks
from frontier_llm.checkpoint.manager import CheckpointManager
from frontier_llm.checkpoint.pacer import Cancellation, Pacer
from frontier_llm.checkpoint.partner import PartnerFiles
from frontier_llm.checkpoint.peer_files import Peer, PeerConnection, PeerServer
from frontier_llm.checkpoint.write_plan import WritePlan
from frontier_llm.errors import CheckpointError
from frontier_llm.launch.world import World
from tests.checkpoint.states import States
from tests.patience import wait_until

PATIENCE = timedelta(seconds=30)
WORLD = World(0, 2, 0, 1, "host", "local", "127.0.0.1", 1)


@pytest.fixture
def plan(tmp_path: Path) -> WritePlan:
    manager = CheckpointManager(tmp_path, Ranks(0, 1, dist.HashStore(), PATIENCE), "blocking", 1)
    manager.begin(1, States().shards, {})
    manager.close()
    return manager.plan


@pytest.mark.parametrize(
    "change",
    [
        {}, {"name": "../x"}, {"name": "a\0b"}, {"name": 3}, {"size": -1}, {"size": 2**40},
        {"size": "x"}, {"size": 10**30}, {"chunk_bytes": 1}, {"chunk_bytes": 2**40},
        {"chunk_bytes": None}, {"record": "{}"}, {"record": "[" * 100_000}, {"record": 3},
        {"port": "x"}, {"secret": "x"}, {"secret": 3}, {"more": 1},
    ],
)  # fmt: skip
def test_a_partner_that_describes_its_file_wrongly_is_refused(
    change: dict[str, Any], plan: WritePlan, tmp_path: Path
) -> None:
    described = {
        "host": "127.0.0.1", "port": 5, "secret": "00" * 16, "name": plan.name, "size": plan.size,
        "chunk_bytes": plan.chunk_bytes, "record": plan.record(None).to_json(), **change,
    }  # fmt: skip
    store = dist.HashStore()
    store.set("checkpoint/partner/1", json.dumps(list(described.values())))
    try:
        pacer = Pacer(None, Cancellation())
        files = PartnerFiles(plan, tmp_path, WORLD, Ranks(0, 2, store, PATIENCE), pacer)
    except CheckpointError as error:
        assert "rank 1 describes its file wrongly" in str(error)  # noqa: PT017
        assert change
    else:
        files.close()
        assert not change


def request(peer: Peer, name: bytes, offset: int, count: int) -> bytes:
    """Send a request; return all bytes until the server ends the connection or waits."""
    answer = b""
    with socket.create_connection((peer.host, peer.port)) as connection:
        with suppress(OSError):  # it has ended the connection, perhaps before the whole request
            connection.sendall(peer.secret + struct.pack("!HQQ", len(name), offset, count) + name)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                answer += part
    return answer


def test_a_server_answers_no_impossible_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pytest reports an exception of the server's thread as a warning, which is an error."""
    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    (tmp_path / "x").write_bytes(b"content")
    server = PeerServer({"x": tmp_path / "x", "folder": tmp_path}.__getitem__, "127.0.0.1")
    nothing = struct.pack("!?Q", True, 0)
    try:
        assert request(server.peer, b"x", 0, 4096).endswith(b"content")
        assert request(server.peer, b"x", 3, 2).endswith(b"te")
        assert request(server.peer, b"x", 0, 2**64 - 1).endswith(b"content")
        assert request(server.peer, b"x", 7, 1) == nothing
        assert request(server.peer, b"x", 2**64 - 1, 1) == nothing
        assert request(server.peer, b"\xff\xfe", 0, 1)[0] == 0
        assert request(server.peer, b"../x", 0, 1)[0] == 0
        assert request(server.peer, b"folder", 0, 1).endswith(b"Is a directory")
        wrong = Peer("127.0.0.1", server.peer.port, bytes(16))
        assert request(wrong, b"x", 0, 1) == b""
    finally:
        server.close()
    assert not failures


def test_idle_connections_to_a_server_cost_no_threads() -> None:
    server = PeerServer({}.__getitem__, "127.0.0.1")
    before, address = threading.active_count(), (server.peer.host, server.peer.port)
    idle = [socket.create_connection(address) for _ in range(40)]
    wait_until(lambda: len(server._listener._new) == len(idle), "the connections")
    assert threading.active_count() <= before, "threads of other tests may end meanwhile"
    server.close()
    for connection in idle:
        connection.close()


@pytest.mark.parametrize(
    "answer",
    [
        struct.pack("!?Q", True, 2**62),
        struct.pack("!?Q", False, 2**62),
        struct.pack("!?Q", True, 9),
    ],
)
def test_a_reader_takes_no_more_than_it_asked_for(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(answer)
                while connection.recv(4096):  # until the reader has sent its request and closed
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        connection = PeerConnection(Peer("127.0.0.1", server.getsockname()[1], bytes(16)))
        with pytest.raises(CheckpointError, match="it announces"):
            connection.read("x", 0, memoryview(bytearray(8)))
        connection.close()
        thread.join()
