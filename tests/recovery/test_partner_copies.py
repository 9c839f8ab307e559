"""The states of dead ranks come from the memory of their node or of the next one."""

import shutil
from functools import partial
from pathlib import Path

import psutil
import pytest

from frontier_llm.checkpoint.folders import step_folder
from frontier_llm.config import decode
from frontier_llm.config.partner_copies import with_partner_copies
from frontier_llm.launch.world import World
from frontier_llm.saving.restorer import Restorer
from frontier_llm.saving.tiers import local_root, shared_folder
from tests.forked_train import Training, train
from tests.ranks import run_ranks
from tests.recovery.test_replaced_ranks import (
    REPLACES,
    WAITS,
    corpus,
    end,
    go_on,
    hold,
    process_of,
    samples,
    wait_for_step,
    watched,
)
from tests.trainer.test_resume import learned, lines, same_states
from tests.values import tiny_values

pytestmark = pytest.mark.slow
__all__ = ["corpus", "watched"]  # fixtures

KEYS = ("sharding=zero3", "checkpoint=lazy", "checkpoint.every_steps=100", "launch.ranks=4",
        "launch.ranks_per_node=2", "parallel.pipeline=1")  # fmt: skip


def with_copies(folder: Path) -> tuple[str, ...]:
    copies = "recovery.partner_copies=true", f"recovery.copies_path={folder}/copies"
    return WAITS, f"run.dir={folder}/run", *copies


def wait_for_copies(root: Path, step: int, *folders: str) -> None:
    """Wait until folders, or those of two nodes and their copies, have a step or a later one."""
    both = "node_00000", "node_00001", "copy_of_node_00000", "copy_of_node_00001"
    for folder in folders or both:
        saved = partial(root.glob, f"*/{folder}/step_????????")
        Training.wait_until(
            lambda saved=saved: any(int(p.name[5:13]) >= step for p in saved()),
            f"step {step} in {folder}",
        )


def test_a_rank_then_a_node_die_without_replicas(
    corpus: tuple[str, ...], tmp_path: Path, watched: list[psutil.Process]
) -> None:
    keys = (*corpus, *KEYS)
    alone, run, copies = tmp_path / "alone", tmp_path / "run", tmp_path / "copies"
    assert train(*keys, f"run.dir={alone}").code == 0
    hold(run, 4, 7)
    training = Training(*keys, *REPLACES, *with_copies(tmp_path))
    wait_for_step(run, 4)
    wait_for_copies(copies, 3)
    process_of(run, 3).kill()
    go_on(run, 4)
    wait_for_step(run, 7)
    wait_for_copies(copies, 6)
    for rank in (2, 3):
        process_of(run, rank).suspend()
    for folder in ("node_00001", "copy_of_node_00000"):  # the memory of the lost node
        shutil.rmtree(next(copies.glob(f"*/{folder}")))
    for rank in (2, 3):
        process_of(run, rank).kill()
    go_on(run, 7)
    ended = end(training, watched)
    assert ended.code == 0, ended.text
    assert "from copies in the memory of their own and the next node" in ended.text
    assert "from copies of nodes 1 (on rank 0's node)" in ended.text
    first, second = (event["step"] for event in lines(run, "ledger.jsonl")
                     if event.get("event") == "resume")  # fmt: skip
    assert first >= 3
    assert second >= max(6, first)
    assert learned(run) == learned(alone)
    assert samples(run)[-1] == samples(alone)[-1]
    assert same_states(run, alone)
    assert not list(copies.glob("*")), "the copies are deleted at the end of the run"


@pytest.mark.exhaustive
def test_copies_on_a_single_node_survive_the_death_of_a_rank(
    corpus: tuple[str, ...], tmp_path: Path, watched: list[psutil.Process]
) -> None:
    keys = (*corpus, "sharding=zero3", "launch.ranks=2", "checkpoint.every_steps=100",
            "optimizer=muon")  # fmt: skip
    alone, run, copies = tmp_path / "alone", tmp_path / "run", tmp_path / "copies"
    assert train(*keys, f"run.dir={alone}").code == 0
    hold(run, 6)
    training = Training(*keys, *REPLACES, *with_copies(tmp_path))
    wait_for_step(run, 6)
    wait_for_copies(copies, 4, "node_00000")
    process_of(run, 0).kill()
    go_on(run, 6)
    ended = end(training, watched)
    assert ended.code == 0, ended.text
    resumed = [e["step"] for e in lines(run, "ledger.jsonl") if e.get("event") == "resume"]
    assert resumed[0] >= 4
    assert learned(run) == learned(alone)
    assert same_states(run, alone)


def test_copies_of_steps_that_are_repeated_leave_the_memory(tmp_path: Path) -> None:
    keys = "recovery.enabled=true", "recovery.partner_copies=true", "checkpoint=lazy"
    places = f"run.dir={tmp_path}/run", f"recovery.copies_path={tmp_path}/copies"
    config = with_partner_copies(decode(tiny_values(*keys, *places)))
    root, shared = local_root(config), shared_folder(config)
    assert root is not None
    for folder in (shared, root / "node_00000", root / "node_00001", root / "copy_of_node_00001"):
        for step in (5, 6):
            (folder / step_folder(step)).mkdir(parents=True)
            (folder / step_folder(step) / "content").write_bytes(bytes(100))

    def resume_from_5(world: World) -> None:
        Restorer(config, world, None, {}, None)._void_later(5)  # type: ignore[arg-type]

    run_ranks(resume_from_5, 2, ranks_per_node=1)
    assert sorted(path.name for path in root.glob("*/*")) == [step_folder(5)] * 3
    assert sorted(path.name for path in shared.glob("*")) == [
        step_folder(5), f"{step_folder(6)}.void",
    ]  # fmt: skip
