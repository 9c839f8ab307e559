"""Old checkpoints are deleted after a newer one is committed, and nothing else is."""

from pathlib import Path

import pytest
import torch.distributed as dist

from frontier_llm.checkpoint.commit_barrier import Ranks
from frontier_llm.checkpoint.folders import MANIFEST, superseded
from frontier_llm.checkpoint.manager import CheckpointManager
from frontier_llm.checkpoint.writer import Options
from tests.checkpoint.crew import PATIENCE
from tests.checkpoint.states import States


def save(folder: Path, steps: list[int], keep: int, every: int | None = None) -> list[int]:
    options = Options(keep_every_steps=every, chunk_bytes=4096)
    ranks = Ranks(0, 1, dist.HashStore(), PATIENCE)
    manager = CheckpointManager(folder, ranks, "blocking", keep, options)
    states = States()
    for step in steps:
        manager.begin(step, states.shards, {})
    return sorted(int(path.name[5:]) for path in folder.glob("step_????????"))


@pytest.mark.parametrize(
    ("keep", "every", "left"),
    [
        (1, None, [50]),
        (3, None, [30, 40, 50]),
        (9, None, [10, 20, 30, 40, 50]),
        (1, 20, [20, 40, 50]),
    ],
)
def test_the_newest_checkpoints_are_kept(
    keep: int, every: int | None, left: list[int], tmp_path: Path
) -> None:
    steps = [10, 20, 30, 40, 50]
    assert save(tmp_path, steps, keep=9) == steps
    announced = {step for step, _ in superseded(tmp_path, keep, every)}
    assert sorted({*steps} - announced) == left
    assert save(tmp_path, steps[-1:], keep, every) == left


def test_damaged_checkpoints_are_kept_and_not_counted(tmp_path: Path) -> None:
    save(tmp_path, [1, 2, 3], keep=3)
    (tmp_path / "step_00000003" / MANIFEST).unlink()
    assert save(tmp_path, [4], keep=2) == [2, 3, 4]


def test_a_checkpoint_of_an_earlier_step_is_kept_when_it_is_committed(tmp_path: Path) -> None:
    save(tmp_path, [10, 20, 30], keep=3)
    assert save(tmp_path, [15], keep=1) == [15, 30]


def test_only_unfinished_checkpoints_are_removed(tmp_path: Path) -> None:
    for name in ("step_00000003.partial", "step_00000001.deleting", "step_00000009.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank_00000.safetensors").write_bytes(b"x")
    (tmp_path / "notes").mkdir()
    (tmp_path / "step_00000001.txt").write_text("")
    save(tmp_path, [5], keep=1)
    assert {path.name for path in tmp_path.iterdir()} == {
        "notes", "step_00000001.txt", "step_00000005", "step_00000009.partial",
    }  # fmt: skip
