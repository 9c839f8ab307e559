"""Checkpoints at several levels: the nodes' disks, their partners' disks, the run directory."""

import errno
import json
import os
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.checkpoint.drain import DrainSource
from frontier_llm.checkpoint.kill_points import VARIABLE
from frontier_llm.checkpoint.mover import Mover
from frontier_llm.checkpoint.peer_files import PeerConnection
from frontier_llm.checkpoint.range_reader import RangeReader
from frontier_llm.checkpoint.rank_file import RankFile
from frontier_llm.errors import CheckpointError
from tests.conftest import mount
from tests.covering import covering
from tests.forked_train import TINY, train
from tests.patience import patient, wait_until
from tests.texts import prose

pytestmark = pytest.mark.slow

NODES = ("node_00000", "node_00001")
SCHEDULE = ("optimizer.decay_steps=8", "optimizer.warmup_steps=2")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Two nodes of two ranks, which save to their own disks after each step."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text(prose(40))
    return (
        *TINY, *SCHEDULE, f"data.path={folder}/text.txt", f"data.directory={folder}/prepared",
        "launch.ranks=4", "launch.ranks_per_node=2", "sharding=zero1", "checkpoint.every_steps=4",
    )  # fmt: skip


def nodes(tmp_path: Path, *more: str) -> tuple[str, ...]:
    return (
        f"run.dir={tmp_path}/run", f"checkpoint.tiers.local.path={tmp_path}/local",
        "checkpoint.tiers.local.every_steps=1", "checkpoint.tiers.local.keep=2", *more,
    )  # fmt: skip


def events(run: Path, name: str) -> list[dict[str, Any]]:
    lines = (run / "ledger.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry.get("event") == name]


def losses(run: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.fixture(scope="module")
def direct(tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without node-local checkpoints."""
    run = tmp_path_factory.mktemp("direct") / "run"
    ended = train(*tiny, f"run.dir={run}", "trainer.steps=8", "checkpoint.keep=9")
    assert ended.code == 0, ended.text
    return run


def test_a_drained_checkpoint_is_the_one_that_would_have_been_written(
    tiny: tuple[str, ...], direct: Path, tmp_path: Path
) -> None:
    (tmp_path / "archive").mkdir()
    archive = f"checkpoint.tiers.archive.command='cp -r $CHECKPOINT {tmp_path}/archive'"
    ended = train(*tiny, *nodes(tmp_path, archive), "trainer.steps=6")
    assert ended.code == 0, ended.text
    assert "step 4 is copied to the run directory" in ended.text
    run = tmp_path / "run"
    drained = files(run / "checkpoints" / "step_00000004")
    assert drained == files(direct / "checkpoints" / "step_00000004")
    assert len(drained) == 4
    assert files(tmp_path / "archive" / "step_00000004") == drained


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout",
    [
        ("checkpoint.files=node", "parallel.tensor=2"),
        ("sharding=replicated",),
    ],
)
def test_a_drain_between_files_of_other_layouts(
    layout: tuple[str, ...], tiny: tuple[str, ...], tmp_path: Path
) -> None:
    """A node-local file holds what other ranks of the node and other replicas write elsewhere."""
    node = (*tiny, "trainer.steps=5", "parallel.pipeline=1", *layout)
    assert train(*node, f"run.dir={tmp_path}/direct").code == 0
    ended = train(*node, *nodes(tmp_path))
    assert ended.code == 0, ended.text
    step = Path("checkpoints", "step_00000004")
    drained = files(tmp_path / "run" / step)
    assert drained == files(tmp_path / "direct" / step)
    assert len(drained) >= 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("point", ["file.half@1", "sealed@0"])
def test_a_killed_drain_leaves_no_checkpoint_and_is_done_again(
    point: str, tiny: tuple[str, ...], direct: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """In test_killed_drain.py drains are killed in the middle of files.

    The kill may find a step on one node's disk only: a node gives its folder the final name after
    rank 0 has committed the step, and its drain begins when its own folder has it.
    """
    monkeypatch.setenv(VARIABLE, f"{point}+drain")
    assert train(*tiny, *nodes(tmp_path), "trainer.steps=8").code != 0
    monkeypatch.delenv(VARIABLE)
    run = tmp_path / "run"
    assert not list(run.glob("checkpoints/step_????????"))
    (root,) = (tmp_path / "local").iterdir()
    on_disks = [{path.name for path in root.glob(f"{node}/step_????????")} for node in NODES]
    newest = int(max(set.intersection(*on_disks)).removeprefix("step_"))
    ended = train(*tiny, *nodes(tmp_path), "trainer.steps=8")
    assert ended.code == 0, ended.text
    resumed = events(run, "resume")[-1]["step"]
    assert resumed == newest >= 3
    assert f"step {resumed} is copied to the run directory" in ended.text
    assert losses(run) == losses(direct)


def lose(tmp_path: Path, node: int) -> None:
    """Remove what lies on a node's disk: its own checkpoints and the copies of the other node."""
    (root,) = (tmp_path / "local").iterdir()
    shutil.rmtree(root / f"copy_of_node_{1 - node:05d}")
    lose_own(tmp_path, node)


def lose_own(tmp_path: Path, node: int) -> None:
    (root,) = (tmp_path / "local").iterdir()
    shutil.rmtree(root / f"node_{node:05d}")


def stop_after_6(tiny: tuple[str, ...], tmp_path: Path, *more: str) -> Path:
    """Train, and leave what a run leaves that is killed after step 6 is on the nodes' disks."""
    ended = train(*tiny, *nodes(tmp_path, *more), "trainer.steps=7")
    assert ended.code == 0, ended.text
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000007")
    return tmp_path / "run"


class Stopped:
    """Runs that stopped after step 6: each is trained once, and put back for each test."""

    def __init__(self, tiny: tuple[str, ...], folder: Path) -> None:
        self._tiny, self._folder = tiny, folder
        self._names: dict[tuple[str, ...], str] = {}

    def again(self, *more: str) -> Path:
        """Return the folder of the run with these overrides, as it was when the run stopped.

        Each step is on the disk of the next node, too, if the overrides ask for copies.
        """
        name = self._names.get(more, str(len(self._names)))
        used, kept = self._folder / name, self._folder / f"{name}.kept"
        shutil.rmtree(used, ignore_errors=True)
        if more in self._names:
            shutil.copytree(kept, used)
            return used
        used.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            copy_each_step(patch)
            stop_after_6(self._tiny, used, *more)
        shutil.copytree(used, kept)
        self._names[more] = name
        return used


@pytest.fixture(scope="module")
def stopped(tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    return Stopped(tiny, tmp_path_factory.mktemp("stopped"))


def copy_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each copy wait for the one before: a slow machine skips the copies of some steps."""
    enqueue = Mover.enqueue

    def in_turn(self: Mover, *arguments: Any, **options: Any) -> None:
        self.wait()
        enqueue(self, *arguments, **options)

    monkeypatch.setattr(Mover, "enqueue", in_turn)


@pytest.mark.exhaustive
def test_a_lost_node_is_replaced_by_the_copy_of_its_partner(
    tiny: tuple[str, ...], direct: Path, stopped: Stopped
) -> None:
    """The next test loses a node, too."""
    folder = stopped.again("checkpoint.partner=true")
    lose(folder, 1)
    ended = train(*tiny, *nodes(folder, "checkpoint.partner=true"), "trainer.steps=8")
    assert ended.code == 0, ended.text
    assert "from the own disks of nodes 0 and from copies of nodes 1" in ended.text
    assert events(folder / "run", "resume")[-1]["step"] == 6
    assert losses(folder / "run") == losses(direct)


def test_a_copy_that_fails_ends_nothing(
    tiny: tuple[str, ...], direct: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of one step is damaged on its way; with the next step all is copied again."""
    read = PeerConnection.read

    def broken(self: PeerConnection, name: str, *arguments: Any) -> int:
        if name.startswith("step_00000003/rank"):
            raise CheckpointError(os.strerror(errno.EIO))
        return read(self, name, *arguments)

    monkeypatch.setattr(PeerConnection, "read", broken)
    copy_each_step(monkeypatch)
    run = stop_after_6(tiny, tmp_path, "checkpoint.partner=true")
    text = (run / "run.log").read_text()
    assert "step 3 is not copied to the next node: " in text
    assert "; the newest copy is of step 2. Training goes on, and the next step is tried" in text
    lose(tmp_path, 1)
    monkeypatch.undo()
    ended = train(*tiny, *nodes(tmp_path, "checkpoint.partner=true"), "trainer.steps=8")
    assert "from the own disks of nodes 0 and from copies of nodes 1" in ended.text
    assert losses(run) == losses(direct)


@pytest.mark.parametrize("on_error", covering(["stop", "continue"], ["stop"]))
def test_a_run_that_is_not_protected_for_too_long_ends(
    tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: str
) -> None:
    """Only the first copy succeeds; a slow disk decides which step that is."""
    read = PeerConnection.read
    copied: set[str] = set()  # of one process: every rank of the run has its own

    def broken(self: PeerConnection, name: str, *arguments: Any) -> int:
        if copied and name[:13] not in copied:
            raise CheckpointError(os.strerror(errno.EIO))
        copied.add(name[:13])
        return read(self, name, *arguments)

    monkeypatch.setattr(PeerConnection, "read", broken)
    keys = "checkpoint.partner=true", f"checkpoint.on_error={on_error}", "trainer.steps=100000"
    ended = train(*tiny, *nodes(tmp_path, *keys), "checkpoint.protection_minutes=0.02")
    assert ended.code == 1, ended.text
    ending = r"; the newest copy is of step (\d+), from .+ ago \(checkpoint.protection_minutes\)"
    said = re.search(ending, ended.text)
    assert said is not None, ended.text
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    newest = [row["step"] - row["steps_since_copy"] for row in rows if row["steps_since_copy"]]
    assert set(newest) == {int(said[1])}


@pytest.mark.exhaustive
def test_nodes_that_changed_places_and_layouts_go_on_from_the_newest_step(
    tiny: tuple[str, ...], stopped: Stopped
) -> None:
    folder = stopped.again()
    (root,) = (folder / "local").iterdir()
    ended = train(
        *tiny, *nodes(folder), "trainer.steps=8", "sharding=replicated", "launch.ranks=2",
        "launch.ranks_per_node=2",
    )  # fmt: skip
    assert ended.code == 0, ended.text
    assert events(folder / "run", "resume")[-1]["step"] == 6, sorted(root.iterdir())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


def flip_one(folder: Path) -> None:
    (damaged,) = (folder / "local").glob("*/node_00001/step_00000006/rank_00002.safetensors")
    flip(damaged)


def test_a_flipped_byte_on_a_disk_is_replaced_by_the_partner(
    tiny: tuple[str, ...], direct: Path, stopped: Stopped
) -> None:
    folder = stopped.again("checkpoint.partner=true")
    flip_one(folder)
    ended = train(*tiny, *nodes(folder, "checkpoint.partner=true"), "trainer.steps=8")
    assert ended.code == 0, ended.text
    assert "trying another copy of step 6" in ended.text
    assert events(folder / "run", "resume")[-1]["step"] == 6
    assert losses(folder / "run") == losses(direct)


def test_a_flipped_byte_is_not_drained(tiny: tuple[str, ...], stopped: Stopped) -> None:
    folder = stopped.again()
    flip_one(folder)
    ended = train(*tiny, *nodes(folder), "trainer.steps=8", "checkpoint.verify=false")
    assert ended.code != 0
    assert "is not copied to the run directory" in ended.text
    assert "do not match their digest" in ended.text
    assert not (folder / "run" / "checkpoints" / "step_00000006").exists()


@pytest.mark.exhaustive
def test_a_torn_manifest_on_a_disk_is_replaced_by_the_copy(
    tiny: tuple[str, ...], direct: Path, stopped: Stopped
) -> None:
    folder = stopped.again("checkpoint.partner=true")
    (manifest,) = (folder / "local").glob("*/node_00000/step_00000006/manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:1000])
    ended = train(*tiny, *nodes(folder, "checkpoint.partner=true"), "trainer.steps=8")
    assert ended.code == 0, ended.text
    assert "from the own disks of nodes 1 and from copies of nodes 0" in ended.text
    assert losses(folder / "run") == losses(direct)


@pytest.mark.exhaustive
def test_a_flipped_byte_in_the_run_directory_is_replaced(
    tiny: tuple[str, ...], direct: Path, tmp_path: Path
) -> None:
    keep = "checkpoint.tiers.local.keep=9"
    run = stop_after_6(tiny, tmp_path, keep)
    for step in (5, 6):
        for folder in (tmp_path / "local").glob(f"*/*/step_0000000{step}"):
            shutil.rmtree(folder)
    flip(run / "checkpoints" / "step_00000004" / "rank_00001.safetensors")
    ended = train(*tiny, *nodes(tmp_path, keep), "trainer.steps=8")
    assert ended.code == 0, ended.text
    assert "step 4 is read from the own disks of nodes 0, 1" in ended.text
    assert losses(run) == losses(direct)


def steps_in(tmp_path: Path, name: str) -> set[str]:
    return {path.name for path in (tmp_path / "local").glob(f"*/{name}/step_????????")}


def copied_steps(tmp_path: Path) -> list[str]:
    """Return the folders of the steps that node 0 and the copy of node 1 both hold."""
    return sorted(steps_in(tmp_path, "node_00000") & steps_in(tmp_path, "copy_of_node_00001"))


@pytest.mark.exhaustive
def test_a_node_is_lost_before_the_drain_is_done(
    tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = DrainSource.chunks

    def late(self: DrainSource) -> Any:
        wait_until(lambda: copied_steps(tmp_path)[-1:] >= ["step_00000004"], "copies of step 4")
        return chunks(self)

    monkeypatch.setattr(DrainSource, "chunks", late)
    monkeypatch.setenv(VARIABLE, "file.half@2+drain")
    partner = "checkpoint.partner=true"
    assert train(*tiny, *nodes(tmp_path, partner), "trainer.steps=500").code != 0
    monkeypatch.delenv(VARIABLE)
    assert not list(tmp_path.glob("run/checkpoints/step_????????"))
    lose(tmp_path, 1)
    step = int(copied_steps(tmp_path)[-1][5:])
    assert step >= 4
    ended = train(
        *tiny, *nodes(tmp_path, partner), f"trainer.steps={step + 1}",
        "run.allow_changes=[trainer.steps]",
    )  # fmt: skip
    assert ended.code == 0, ended.text
    assert "from copies of nodes 1" in ended.text
    assert events(tmp_path / "run", "resume")[-1]["step"] == step


def test_a_run_of_which_a_node_is_lost_does_not_start_anew(
    tiny: tuple[str, ...], stopped: Stopped
) -> None:
    folder = stopped.again()
    shutil.rmtree(folder / "run" / "checkpoints" / "step_00000004")
    lose_own(folder, 1)
    ended = train(*tiny, *nodes(folder), "trainer.steps=8")
    assert ended.code == 1
    assert "the disks of the nodes hold no complete checkpoint" in ended.text


@pytest.mark.exhaustive
def test_a_full_file_system_of_the_run_directory_costs_no_committed_step(
    tiny: tuple[str, ...], direct: Path, tmp_path: Path
) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    mount(checkpoints, "size=64k")
    try:
        ended = train(*tiny, *nodes(tmp_path, "checkpoint.on_error=continue"), "trainer.steps=7")
    finally:
        subprocess.run(["umount", "-l", str(checkpoints)], check=True)
    assert ended.code == 0, ended.text
    assert "step 4 is not copied to the run directory" in ended.text
    assert "No space left on device" in ended.text
    assert "step 7 is on the disks of the nodes" in ended.text
    ended = train(*tiny, *nodes(tmp_path), "trainer.steps=8")
    assert ended.code == 0, ended.text
    assert events(tmp_path / "run", "resume")[-1]["step"] == 7
    assert losses(tmp_path / "run") == losses(direct)


def test_without_the_nodes_disks_the_run_directory_is_written_directly(
    tiny: tuple[str, ...], direct: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "local"
    disk.mkdir()
    mount(disk, "size=300k")  # room for one checkpoint
    try:
        ended = train(*tiny, *nodes(tmp_path, "checkpoint.on_error=continue"), "trainer.steps=6")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    assert ended.code == 0, ended.text
    assert "No space left on device" in ended.text
    step = Path("checkpoints", "step_00000004")
    assert files(tmp_path / "run" / step) == files(direct / step)


@pytest.mark.parametrize("fault", covering(["read error", "hang"], ["hang"]))
def test_training_goes_on_while_the_drain_fails(
    fault: str, tiny: tuple[str, ...], direct: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In test_bounded_end.py a drain hangs, too, and the run ends."""
    fetch, write, limit = RangeReader.fetch, RankFile.write, patient(0.4)

    def broken(self: RangeReader, *arguments: Any) -> None:
        if fault == "read error" and threading.current_thread().name == "drain":
            raise CheckpointError(os.strerror(errno.EIO))
        fetch(self, *arguments)

    def slow(self: RankFile, *arguments: Any) -> None:
        if (
            fault == "hang"
            and threading.current_thread().name == "drain"
            and "00001" in self._path.name
        ):
            time.sleep(2 * limit)
        write(self, *arguments)

    monkeypatch.setattr(RangeReader, "fetch", broken)
    monkeypatch.setattr(RankFile, "write", slow)
    ended = train(
        *tiny, *nodes(tmp_path, "checkpoint.on_error=continue"), "trainer.steps=8",
        f"checkpoint.timeout_seconds={limit}",
    )  # fmt: skip
    assert ended.code == 0, ended.text
    assert "is not copied to the run directory: " in ended.text
    assert [path.name for path in (tmp_path / "run").glob("checkpoints/*")] == ["step_00000008"]
    last = files(tmp_path / "run" / "checkpoints" / "step_00000008")
    assert last == files(direct / "checkpoints" / "step_00000008")


def late_writes(monkeypatch: pytest.MonkeyPatch, run: Path, steps: int) -> None:
    """Let each write of a checkpoint from the states wait until a run has done some steps."""
    write, metrics = RankFile.write, run / "metrics.jsonl"

    def late(self: RankFile, *arguments: Any) -> None:
        if threading.current_thread().name == "checkpoint":
            wait_until(
                lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) >= steps,
                f"step {steps}",
            )
        write(self, *arguments)

    monkeypatch.setattr(RankFile, "write", late)


def test_checkpoints_are_skipped_while_the_nodes_disks_are_slow(
    tiny: tuple[str, ...], direct: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_writes(monkeypatch, tmp_path / "run", 7)
    keys = ("checkpoint.when_busy=skip", "checkpoint.every_steps=3")
    ended = train(*tiny, *nodes(tmp_path, *keys), "trainer.steps=8")
    assert ended.code == 0, ended.text
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    skipped = sum(line["checkpoints_skipped"] for line in lines)
    assert "is not saved: the checkpoint before it is still being written" in ended.text
    saved = {path.name for path in (tmp_path / "local").glob("*/*/step_????????")}
    assert saved, "no checkpoint was written"
    assert 1 <= skipped <= 6
    assert losses(run) == losses(direct)
    assert (run / "checkpoints" / "step_00000008").exists(), "the last step is always saved"


@pytest.mark.exhaustive
def test_checkpoints_are_skipped_while_the_run_directory_is_slow(
    tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_writes(monkeypatch, tmp_path / "run", 5)
    keys = (f"run.dir={tmp_path}/run", "checkpoint.when_busy=skip", "checkpoint.every_steps=1")
    ended = train(*tiny, *keys, "checkpoint.keep=9", "trainer.steps=6")
    assert ended.code == 0, ended.text
    committed = {path.name for path in (tmp_path / "run" / "checkpoints").glob("step_????????")}
    assert {"step_00000001", "step_00000006"} <= committed
    assert len(committed) < 6
