"""A run resumes from parts of a checkpoint at several levels, without a copy of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.checkpoint.peer_files import PeerConnection, PeerServer
from frontier_llm.checkpoint.range_reader import RangeReader
from frontier_llm.errors import CheckpointError
from tests.covering import covering
from tests.forked_train import train
from tests.saving.test_drain import (
    Stopped,
    direct,
    events,
    lose,
    lose_own,
    losses,
    nodes,
    stop_after_6,
    stopped,
    tiny,
)

pytestmark = pytest.mark.slow
__all__ = ["direct", "stopped", "tiny"]  # fixtures
OTHER = ("launch.ranks=2", "launch.ranks_per_node=1", "parallel.tensor=2", "parallel.pipeline=1")
"""Another layout, on two nodes of one rank."""


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that gets the folder and the way of every read of a checkpoint file."""
    log, fill, start = tmp_path / "reads", RangeReader._fill, PeerServer.__init__

    def note(way: str, path: Path) -> None:
        place = next(p for p in path.parts if p.startswith(("node", "copy_of", "checkpoints")))
        with log.open("a") as stream:
            stream.write(json.dumps([place, way]) + "\n")

    def filled(self: RangeReader, descriptor: int, path: Path, *rest: Any) -> None:
        note("read", path)
        fill(self, descriptor, path, *rest)

    def started(self: PeerServer, find: Callable[[str], Path], host: str) -> None:
        def noted(name: str) -> Path:
            note("served", path := find(name))
            return path

        start(self, noted, host)

    monkeypatch.setattr(RangeReader, "_fill", filled)
    monkeypatch.setattr(PeerServer, "__init__", started)
    return log


def ways(reads: Path) -> set[tuple[str, str]]:
    return {(place, way) for place, way in map(json.loads, reads.read_text().splitlines())}


def test_another_layout_reads_the_disks_of_other_nodes_over_the_network(
    tiny: tuple[str, ...], direct: Path, stopped: Stopped, reads: Path
) -> None:
    folder = stopped.again()
    run = folder / "run"
    reads.write_text("")
    keys = nodes(folder, "checkpoint.every_steps=100", "checkpoint.tiers.local.every_steps=100")
    ended = train(*tiny, *keys, *OTHER, "trainer.steps=8")
    assert ended.code == 0, ended.text
    assert "step 6 is read from the own disks of nodes 0, 1" in ended.text
    assert events(run, "resume")[-1]["step"] == 6
    assert ways(reads) == {
        (node, way) for node in ("node_00000", "node_00001") for way in ("read", "served")
    }
    names = sorted(path.name for path in run.glob("checkpoints/*"))
    assert "step_00000006" in names, "the run directory gets the step as soon as it is read"
    assert [loss for _, loss in losses(run)] == pytest.approx(
        [loss for _, loss in losses(direct)], rel=1e-5
    )


def test_a_lost_node_s_files_are_read_from_the_copy(
    tiny: tuple[str, ...], stopped: Stopped, reads: Path
) -> None:
    folder = stopped.again("checkpoint.partner=true")
    lose(folder, 1)
    reads.write_text("")
    ended = train(*tiny, *nodes(folder), *OTHER, "trainer.steps=8")
    assert ended.code == 0, ended.text
    assert events(folder / "run", "resume")[-1]["step"] == 6
    assert {("node_00000", "read"), ("copy_of_node_00001", "served")} <= ways(reads)


@pytest.mark.exhaustive
def test_the_rest_is_read_from_the_run_directory(
    tiny: tuple[str, ...], direct: Path, tmp_path: Path, reads: Path
) -> None:
    """Step 4 was drained. Later steps and the disk of node 1 are lost."""
    keep = "checkpoint.tiers.local.keep=9"
    run = stop_after_6(tiny, tmp_path, keep)
    for step in (5, 6):
        for folder in (tmp_path / "local").glob(f"*/*/step_0000000{step}"):
            shutil.rmtree(folder)
    lose_own(tmp_path, 1)
    reads.write_text("")
    ended = train(*tiny, *nodes(tmp_path, "checkpoint.every_steps=100"), "trainer.steps=8", *OTHER)
    assert ended.code == 0, ended.text
    assert "step 4 is read from the own disks of nodes 0; the rest is in" in ended.text
    assert events(run, "resume")[-1]["step"] == 4
    assert {("node_00000", "read"), ("node_00000", "served")} <= ways(reads)
    assert ("checkpoints", "read") in ways(reads)
    assert [loss for _, loss in losses(run)] == pytest.approx(
        [loss for _, loss in losses(direct)], rel=1e-5
    )


FILE, MANIFEST = "rank_00002.safetensors", "manifest.json"
DAMAGED = [(is_copy, name) for is_copy in (False, True) for name in (FILE, MANIFEST)]
"""Whether the only copy of the node is damaged, and the file."""


@pytest.mark.parametrize("damage", covering(DAMAGED, DAMAGED[:2] + DAMAGED[3:]), ids=str)
def test_a_damaged_newest_step_on_a_disk_is_not_passed_over(
    damage: tuple[bool, str], tiny: tuple[str, ...], stopped: Stopped
) -> None:
    is_copy, name = damage
    partner = ("checkpoint.partner=true",) if is_copy else ()
    base = stopped.again(*partner)
    if is_copy:
        lose(base, 1)
    folder = "copy_of_node_00001" if is_copy else "node_00001"
    (damaged,) = (base / "local").glob(f"*/{folder}/step_00000006/{name}")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    going_on = (*tiny, *nodes(base, *partner), "trainer.steps=7")
    ended = train(*going_on)
    assert ended.code == 1, ended.text
    assert f"{damaged.parent}" in ended.text
    assert "set checkpoint.fallback=true to resume from the one before" in ended.text
    assert "Traceback" not in ended.text
    ended = train(*going_on, "checkpoint.fallback=true")
    assert ended.code == 0, ended.text
    assert f"{damaged.parent}" in ended.text
    assert events(base / "run", "resume")[-1]["step"] == 5


def test_later_steps_in_another_place_are_not_left_behind(
    tiny: tuple[str, ...], tmp_path: Path
) -> None:
    one = "launch.ranks=2", "launch.ranks_per_node=2"
    run, key = stop_after_6(tiny, tmp_path, *one), "checkpoint.tiers.local.path"
    going_on = (*tiny, *one, f"run.dir={run}", "trainer.steps=8")
    for other in ((), (f"{key}={tmp_path}/other",)):
        ended = train(*going_on, *other)
        assert ended.code == 2, ended.text
        assert "has steps up to 6, and without them the run goes on from step 4" in ended.text
        assert f"set {key}={tmp_path}/local, or train these steps again" in ended.text
    ended = train(*going_on, f"run.allow_changes=[{key}]")
    assert ended.code == 0, ended.text
    assert "again steps 5 to 7, which no checkpoint has" in " ".join(ended.text.split())
    assert events(run, "resume")[-1]["step"] == 4


def test_a_server_serves_only_its_files_and_only_with_the_secret(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    (tmp_path / "other").write_bytes(b"private")
    files = {"file": tmp_path / "file", "absent": tmp_path / "absent"}
    server = PeerServer(files.__getitem__, "127.0.0.1")
    connection = PeerConnection(server.peer)
    content = memoryview(bytearray(50))
    assert connection.read("file", 20, content) == 50
    assert bytes(content) == bytes(range(20, 70))
    assert connection.read("file", 90, content) == 10, "the end of the file"
    for name in ("other", "../other", "absent"):
        with pytest.raises(CheckpointError, match=r"cannot be read by 127\.0\.0\.1"):
            connection.read(name, 0, content)
    stranger = PeerConnection(type(server.peer)("127.0.0.1", server.peer.port, bytes(16)))
    with pytest.raises(CheckpointError, match="cannot be read: "):
        stranger.read("file", 0, content)
    server.close()
    with pytest.raises(CheckpointError):
        connection.read("file", 0, content)
