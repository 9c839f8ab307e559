"""One checkpoint, several homes: the nodes' disks, their partners' disks, and the run directory."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.checkpoint.kill_points import VARIABLE
from tests.forked_train import TINY, train

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCHEDULE = ("optimizer.decay_steps=8", "optimizer.warmup_steps=2")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Two nodes of two ranks, which save to their own disks after each step."""
    folder = tmp_path_factory.mktemp("corpus")
    sources = sorted((ROOT / "frontier_llm").rglob("*.py"))[:40]
    (folder / "text.txt").write_text("\n\n".join(s.read_text() for s in sources))
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
    archive = f"checkpoint.tiers.archive.command='cp -r $CHECKPOINT {tmp_path}/archive'"
    ended = train(*tiny, *nodes(tmp_path, archive), "trainer.steps=6")
    assert ended.code == 0, ended.text
    assert "step 4 is copied to the run directory" in ended.text
    run = tmp_path / "run"
    drained = files(run / "checkpoints" / "step_00000004")
    assert drained == files(direct / "checkpoints" / "step_00000004")
    assert len(drained) == 4
    assert files(tmp_path / "archive") == drained


@pytest.mark.parametrize("point", ["file.half@1", "sealed@0"])
def test_a_killed_drain_leaves_no_checkpoint_and_is_done_again(
    point: str, tiny: tuple[str, ...], direct: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv(VARIABLE, f"{point}+drain")
    assert train(*tiny, *nodes(tmp_path), "trainer.steps=8").code != 0
    monkeypatch.delenv(VARIABLE)
    run = tmp_path / "run"
    assert not list(run.glob("checkpoints/step_????????"))
    ended = train(*tiny, *nodes(tmp_path), "trainer.steps=8")
    assert ended.code == 0, ended.text
    resumed = events(run, "resume")[-1]["step"]
    assert resumed >= 4
    assert f"step {resumed} is copied to the run directory" in ended.text
    assert losses(run) == losses(direct)


def lose(tmp_path: Path, node: int) -> None:
    """Remove what lies on a node's disk: its own checkpoints and the copies of the other node."""
    (root,) = (tmp_path / "local").iterdir()
    for folder in (root / f"node_{node:05d}", root / f"copy_of_node_{1 - node:05d}"):
        shutil.rmtree(folder)


def stop_after_6(tiny: tuple[str, ...], tmp_path: Path, *more: str) -> Path:
    """Train, and leave what a run leaves that is killed after step 6 is on the nodes' disks."""
    ended = train(*tiny, *nodes(tmp_path, *more), "trainer.steps=7")
    assert ended.code == 0, ended.text
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000007")
    return tmp_path / "run"


def test_a_lost_node_is_replaced_by_the_copy_of_its_partner(
    tiny: tuple[str, ...], direct: Path, tmp_path: Path
) -> None:
    run = stop_after_6(tiny, tmp_path, "checkpoint.partner=true")
    lose(tmp_path, 1)
    ended = train(*tiny, *nodes(tmp_path, "checkpoint.partner=true"), "trainer.steps=8")
    assert ended.code == 0, ended.text
    assert "from the own disks of nodes 0 and from copies of nodes 1" in ended.text
    assert events(run, "resume")[-1]["step"] == 6
    assert losses(run) == losses(direct)


def test_nodes_that_changed_places_and_layouts_go_on_from_the_newest_step(
    tiny: tuple[str, ...], tmp_path: Path
) -> None:
    run = stop_after_6(tiny, tmp_path)
    (root,) = (tmp_path / "local").iterdir()
    ended = train(
        *tiny, *nodes(tmp_path), "trainer.steps=8", "sharding=replicated", "launch.ranks=2",
        "launch.ranks_per_node=2",
    )  # fmt: skip
    assert ended.code == 0, ended.text
    assert events(run, "resume")[-1]["step"] == 6, sorted(root.iterdir())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


@pytest.fixture
def flipped(tiny: tuple[str, ...], tmp_path: Path) -> Path:
    run = stop_after_6(tiny, tmp_path, "checkpoint.partner=true")
    (damaged,) = (tmp_path / "local").glob("*/node_00001/step_00000006/rank_00002.safetensors")
    flip(damaged)
    return run


def test_a_flipped_byte_on_a_node_s_disk_is_found_and_the_partner_helps(
    tiny: tuple[str, ...], flipped: Path, direct: Path, tmp_path: Path
) -> None:
    ended = train(*tiny, *nodes(tmp_path, "checkpoint.partner=true"), "trainer.steps=8")
    assert ended.code == 0, ended.text
    assert "trying another copy of step 6" in ended.text
    assert events(flipped, "resume")[-1]["step"] == 6
    assert losses(flipped) == losses(direct)


def test_a_flipped_byte_is_not_drained(tiny: tuple[str, ...], tmp_path: Path) -> None:
    run = stop_after_6(tiny, tmp_path)
    (damaged,) = (tmp_path / "local").glob("*/node_00001/step_00000006/rank_00002.safetensors")
    flip(damaged)
    ended = train(*tiny, *nodes(tmp_path), "trainer.steps=8", "checkpoint.verify=false")
    assert ended.code != 0
    assert "is not copied to the run directory" in ended.text
    assert "do not match their digest" in ended.text
    assert not (run / "checkpoints" / "step_00000006").exists()
