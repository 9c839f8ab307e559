"""Ranks of a running job die and are replaced, and the run learns what it would have learned."""

import gc
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from frontier_llm.trainer.callbacks.callback import Callback
from frontier_llm.trainer.callbacks.run_checks import Stragglers
from frontier_llm.trainer.step import TrainStep
from tests.forked_train import TINY, Ended, Training, train
from tests.patience import patient, wait_until
from tests.texts import prose
from tests.trainer.test_resume import learned, lines, same_states

pytestmark = pytest.mark.slow

STEPS = 12
REPLACES = ("recovery.enabled=true", "run.resume=never")
WAITS = "callbacks=[tests.recovery.test_replaced_ranks:Waits]"


class Waits(Callback):
    """Waits after the steps that the test holds, and looks for what was not freed."""

    def on_replacement(self, last_step: int) -> None:
        assert sum(isinstance(found, TrainStep) for found in gc.get_objects()) == 1

    def on_step_begin(self, step: int) -> None:
        file = held(Path(self.context.config.run.dir), step - 1)
        wait_until(lambda: not file.exists(), f"the end of {file}")


class SlowFirstRank1(Waits):
    """Makes the first process of rank 1 seem to be on a slow device."""

    def on_step_begin(self, step: int) -> None:
        super().on_step_begin(step)
        started = (Path(self.context.config.run.dir) / "ranks.jsonl").read_text().splitlines()
        is_first = [json.loads(line)["rank"] for line in started].count(1) == 1
        slowness = 9.0 if self.context.world.rank == 1 and is_first else 1.0
        Stragglers._probe = lambda _: 0.01 * slowness  # type: ignore[method-assign]


class DiesAtStep3(Callback):
    """Kills its rank at the same step whenever it comes there."""

    def on_step_begin(self, step: int) -> None:
        if step == 3 and self.context.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Refuses(Callback):
    """Fails as a user's callback does."""

    def on_step_begin(self, step: int) -> None:
        if step == 3 and self.context.world.rank == 1:
            raise ValueError("no more")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text(prose(40))
    where = (f"data.path={folder}/text.txt", f"data.directory={folder}/prepared")
    return (*TINY, *where, f"trainer.steps={STEPS}", f"optimizer.decay_steps={STEPS}",
            "optimizer.warmup_steps=2", "trainer.evaluate_every_steps=5")  # fmt: skip


def held(run: Path, step: int) -> Path:
    return run.with_name(f"{run.name}_waits_after_{step}")


def hold(run: Path, *steps: int) -> None:
    """Let a run wait after some steps, until the test lets it go on.

    Otherwise a run is over, or two steps further, when a test is late to do something to it.
    """
    for step in steps:
        held(run, step).touch()


def go_on(run: Path, step: int) -> None:
    held(run, step).unlink()


def wait_for_step(run: Path, step: int) -> None:
    path = run / "metrics.jsonl"
    Training.wait_until(
        lambda: path.exists() and len(path.read_bytes().splitlines()) >= step, f"step {step}"
    )


def process_of(run: Path, rank: int) -> psutil.Process:
    started = [line for line in lines(run, "ranks.jsonl") if line["rank"] == rank]
    return psutil.Process(started[-1]["pid"])


def wait_for_start(run: Path, generation: int) -> None:
    def has_begun() -> bool:
        if not (run / "ranks.jsonl").exists():
            return False
        return generation in (line["generation"] for line in lines(run, "ranks.jsonl"))

    Training.wait_until(has_begun, f"generation {generation}")


def samples(run: Path) -> list[tuple[Any, ...]]:
    """The samples of all lines of the ledger, also of those that are written twice."""
    return [(e["step"], e["first_sample"], e["samples"], e["digest"])
            for e in lines(run, "ledger.jsonl") if "digest" in e]  # fmt: skip


def validations(run: Path) -> dict[int, float]:
    return {m["step"]: m["validation_loss"] for m in lines(run) if m.get("validation_loss")}


@pytest.fixture
def watched() -> Iterator[list[psutil.Process]]:
    """The processes that the test adds must have ended in the end."""
    processes: list[psutil.Process] = []
    yield processes
    _, alive = psutil.wait_procs(processes, timeout=patient(5))
    assert not alive


def end(training: Training, watched: list[psutil.Process]) -> Ended:
    watched += psutil.Process(training.pid).children(recursive=True)
    return training.wait()


def blended(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Add a second corpus to the only one."""
    path = next(key.removeprefix("data.path=") for key in keys if key.startswith("data.path="))
    other = Path(path).with_name("other.txt")
    other.write_text(prose(40, 40))
    corpora = f"[{{name: a, path: {path}, weight: 3}}, {{name: b, path: {other}, weight: 1}}]"
    kept = [key for key in keys if key != f"data.path={path}" and key != "data=text"]
    return (*kept, "data=blend", f"data.corpora={corpora}")


PIPELINE = ("launch.ranks=4", "parallel.pipeline=2", "sharding=zero1", "sharding.optimizer=1",
            "sharding.grads=1", "precision=bf16")  # fmt: skip

EIGHT_BITS = ("launch.ranks=4", "parallel.tensor=2", "parallel.pipeline=1", "sharding=zero1",
              "sharding.optimizer=1", "sharding.grads=1", "optimizer=adamw_8bit",
              "model.dropout=0.1")  # fmt: skip

CONTEXT = ("launch.ranks=4", "parallel.context=2", "parallel.pipeline=1", "sharding=zero1",
           "sharding.optimizer=1", "sharding.grads=1", "data.documents=separate",
           "model.positions=rotary")  # fmt: skip

CROSS_ATTENTION = ("launch.ranks=4", "parallel.pipeline=2", "sharding=zero1", "sharding.grads=1",
                   "sharding.optimizer=1", "model=t5gemma_tiny", "data=text_spans",
                   "model.layers=4", "model.head_dim=16", "model.vocabulary=500",
                   "optimizer.cross_attention_steps=5")  # fmt: skip
"""One rank dies while only cross-attention is updated, two die later."""


@pytest.mark.parametrize(
    "layout",
    [
        PIPELINE,
        pytest.param(EIGHT_BITS, marks=pytest.mark.exhaustive),
        pytest.param(CONTEXT, marks=pytest.mark.exhaustive),
        pytest.param(CROSS_ATTENTION, marks=pytest.mark.exhaustive),
    ],
    ids=["pipeline bf16 blend", "tensor 8-bit states", "context", "cross-attention"],
)  # fmt: skip
def test_ranks_die_and_the_others_keep_their_states(
    layout: tuple[str, ...], corpus: tuple[str, ...], tmp_path: Path, watched: list[psutil.Process]
) -> None:
    keys = (*corpus, *layout, "checkpoint.every_steps=100")
    keys = blended(keys) if layout is PIPELINE else keys
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert train(*keys, f"run.dir={alone}").code == 0
    hold(run, 3, 6, 8)
    training = Training(*keys, *REPLACES, WAITS, f"run.dir={run}")
    for step, rank in ((3, 3), (6, 0), (8, 1)):
        wait_for_step(run, step)
        process_of(run, rank).kill()
        go_on(run, step)
    ended = end(training, watched)
    assert ended.code == 0, ended.text
    assert ended.text.count("was killed by SIGKILL; process") == 3
    assert "the run resumes" not in ended.text
    assert learned(run) == learned(alone)
    assert samples(run) == samples(alone)
    assert validations(run).items() <= validations(alone).items()
    assert same_states(run, alone)
    started = [(line["generation"], line["rank"]) for line in lines(run, "ranks.jsonl")]
    assert [rank for _, rank in started] == [0, 1, 2, 3, 3, 0, 1]
    assert sorted(started[4:]) == started[4:], "one generation after another"
    assert json.loads((run / "summary.json").read_text())["exit_code"] == 0


def test_without_a_replica_all_processes_load_the_checkpoint(
    corpus: tuple[str, ...], tmp_path: Path, watched: list[psutil.Process]
) -> None:
    keys = (*corpus, "sharding=zero3", "launch.ranks=2", "checkpoint.every_steps=4")
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert train(*keys, f"run.dir={alone}").code == 0
    hold(run, 6)
    training = Training(*keys, *REPLACES, WAITS, "recovery.spares=1", f"run.dir={run}")
    wait_for_step(run, 6)
    survivor = process_of(run, 0).pid
    process_of(run, 1).kill()
    go_on(run, 6)
    ended = end(training, watched)
    assert ended.code == 0, ended.text
    assert "no other rank has the states of rank 1" in ended.text
    assert process_of_last(run, 0) == survivor, "the other rank has kept its process"
    assert learned(run) == learned(alone)
    assert same_states(run, alone)


def process_of_last(run: Path, rank: int) -> int:
    return int([line for line in lines(run, "ranks.jsonl") if line["rank"] == rank][-1]["pid"])


@pytest.mark.exhaustive
def test_before_the_first_checkpoint_the_run_begins_again(
    corpus: tuple[str, ...], tmp_path: Path, watched: list[psutil.Process]
) -> None:
    keys = (*corpus, "sharding=zero1", "checkpoint.every_steps=100")
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert train(*keys, f"run.dir={alone}").code == 0
    hold(run, 3)
    training = Training(*keys, *REPLACES, WAITS, f"run.dir={run}")
    wait_for_step(run, 3)
    process_of(run, 0).kill()
    go_on(run, 3)
    ended = end(training, watched)
    assert ended.code == 0, ended.text
    assert learned(run) == learned(alone)


@pytest.mark.exhaustive
def test_a_rank_that_hangs_is_replaced(
    corpus: tuple[str, ...], tmp_path: Path, watched: list[psutil.Process]
) -> None:
    keys = (*corpus, "launch.ranks=2", "sharding=zero1", "sharding.optimizer=1",
            "sharding.grads=1")  # fmt: skip
    limits = (f"watchdog.step_seconds={patient(2)}", f"recovery.timeout_seconds={patient(7.5)}",
              f"watchdog.first_step_seconds={patient(2)}")  # fmt: skip
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert train(*keys, f"run.dir={alone}").code == 0
    hold(run, 5)
    training = Training(*keys, *limits, *REPLACES, WAITS, f"run.dir={run}")
    wait_for_step(run, 5)
    process_of(run, 1).suspend()
    go_on(run, 5)
    ended = end(training, watched)
    assert ended.code == 0, ended.text
    assert "late: rank 1" in ended.text
    assert learned(run) == learned(alone)


def swap(run: Path, rank: int) -> None:
    """Write the file SWAP at once, and wait until it is read."""
    (run / "SWAP.part").write_text(f"rank={rank}\n")
    (run / "SWAP.part").rename(run / "SWAP")
    Training.wait_until(lambda: not (run / "SWAP").exists(), "the end of the file SWAP")


def test_a_file_asks_for_another_process(
    corpus: tuple[str, ...], tmp_path: Path, watched: list[psutil.Process]
) -> None:
    run = tmp_path / "run"
    keys = (*corpus, "launch.ranks=2", "sharding=zero1", "sharding.optimizer=1",
            "sharding.grads=1")  # fmt: skip
    hold(run, 3)
    training = Training(*keys, *REPLACES, WAITS, f"run.dir={run}")
    wait_for_step(run, 3)
    swap(run, 9)
    swap(run, 1)
    go_on(run, 3)
    ended = end(training, watched)
    assert ended.code == 0, ended.text
    assert "SWAP says 'rank=9'" in ended.text
    assert [line["rank"] for line in lines(run, "ranks.jsonl")] == [0, 1, 1]


def test_a_rank_that_dies_again_and_again_ends_the_run(
    corpus: tuple[str, ...], tmp_path: Path
) -> None:
    dies = "callbacks=[tests.recovery.test_replaced_ranks:DiesAtStep3]"
    keys = (*corpus, *REPLACES, dies, "sharding=zero1", "sharding.optimizer=1", "sharding.grads=1",
            "parallel.pipeline=1", "recovery.tries=2")  # fmt: skip
    ended = train(*keys, f"run.dir={tmp_path / 'run'}")
    assert ended.code == 1
    assert ended.text.count("takes its place") == 2
    assert "ranks failed 3 times without a new step" in ended.text
    assert "rank 1 was killed by SIGKILL" in ended.text
    assert "the remaining ranks have saved step 2" in ended.text
    assert (tmp_path / "run" / "checkpoints" / "step_00000002").is_dir()


@pytest.mark.exhaustive
def test_the_last_save_needs_no_states_in_rank_0(
    corpus: tuple[str, ...], tmp_path: Path, watched: list[psutil.Process]
) -> None:
    keys = (*corpus, "launch.ranks=3", "data.global_batch=12", "parallel.pipeline=1",
            "sharding=zero1", "sharding.optimizer=1", "sharding.grads=1",
            "checkpoint.every_steps=100")  # fmt: skip
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert train(*keys, f"run.dir={alone}").code == 0
    hold(run, 3)
    training = Training(*keys, *REPLACES, WAITS, "recovery.tries=1", f"run.dir={run}")
    wait_for_step(run, 3)
    stopped = process_of(run, 1)
    stopped.suspend()  # so that the new process of rank 0 gets no states before it is killed, too
    process_of(run, 0).kill()
    wait_for_start(run, generation=1)
    stopped.kill()
    go_on(run, 3)
    ended = end(training, watched)
    assert ended.code == 1
    assert "ranks failed 2 times without a new step" in ended.text
    assert "the remaining ranks have saved step" in ended.text
    assert train(*keys, f"run.dir={run}").code == 0
    assert len(lines(run)) == STEPS, "no step was done twice"
    assert learned(run) == learned(alone)


def test_an_error_that_says_what_to_do_ends_the_run(
    corpus: tuple[str, ...], tmp_path: Path
) -> None:
    refuses = "callbacks=[tests.recovery.test_replaced_ranks:Refuses]"
    ended = train(*corpus, *REPLACES, refuses, "sharding=zero1", f"run.dir={tmp_path / 'run'}")
    assert ended.code == 1
    assert "Refuses" in ended.text
    assert "takes its place" not in ended.text


@pytest.mark.parametrize("spares", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_slow_rank_is_replaced_if_a_process_waits(
    spares: int, corpus: tuple[str, ...], tmp_path: Path, watched: list[psutil.Process]
) -> None:
    run = tmp_path / "run"
    keys = (*corpus, "launch.ranks=4", "parallel.pipeline=1", "sharding=zero1",
            "sharding.optimizer=2", "sharding.grads=1", "watchdog.stragglers_every_steps=2",
            "watchdog.replace_stragglers=true", f"recovery.spares={spares}",
            "callbacks=[tests.recovery.test_replaced_ranks:SlowFirstRank1]")  # fmt: skip
    hold(run, 6)
    training = Training(*keys, *REPLACES, f"run.dir={run}")
    if spares:
        wait_for_start(run, generation=1)
    else:
        Training.wait_until(lambda: "no process waits" in training.said(), "the advice")
    go_on(run, 6)
    ended = end(training, watched)
    assert ended.code == 0, ended.text
    assert "rank 1 is slow" in ended.text
    ranks = [line["rank"] for line in lines(run, "ranks.jsonl")]
    assert ranks == [0, 1, 2, 3] + [1] * spares
    assert ("no process waits" in ended.text) == (not spares)
