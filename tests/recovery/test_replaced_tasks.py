"""Tasks of a Slurm job whose ranks are replaced: by their agents, and by those of spare tasks."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from frontier_llm.cli.main import main
from frontier_llm.cli.replaceable import ranks_of
from frontier_llm.config import decode
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.membership import task_members
from tests.covering import covering
from tests.forked_train import TINY, Forked, train
from tests.patience import MARGIN, patient
from tests.ports import reserved_port
from tests.recovery.test_replaced_ranks import (
    WAITS,
    go_on,
    hold,
    process_of,
    samples,
    swap,
    wait_for_step,
)
from tests.texts import prose
from tests.trainer.test_resume import learned, lines, same_states

STEPS = 12


def start_task(task: int, tasks: int, port: int, *overrides: str) -> Forked:
    """Start a process in which srun's variables name a task."""
    variables = {
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task),
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": str(tasks),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": str(os.getpid()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }

    def run() -> int:
        os.environ.update(variables)
        return main(["train", *overrides])

    return Forked(run)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text(prose(40))
    return (
        *TINY, f"data.path={folder}/text.txt", f"data.directory={folder}/prepared",
        f"trainer.steps={STEPS}", f"optimizer.decay_steps={STEPS}", "optimizer.warmup_steps=2",
        "sharding=zero1", "sharding.optimizer=1", "sharding.grads=1", "parallel.pipeline=1",
    )  # fmt: skip


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a job; its tasks are patient with each other, as they share busy cores."""
    for name in ("_DOUBT_SECONDS", "_SUSPECT_SECONDS", "_SILENCE_SECONDS"):
        seconds = getattr(task_members, name)
        monkeypatch.setattr(task_members, name, patient(seconds / MARGIN))
    with reserved_port() as found:
        yield found


def start_job(tasks: int, port: int, *overrides: str) -> list[Forked]:
    """Start the tasks of a job."""
    overrides = (*overrides, "recovery.enabled=true", WAITS)
    return [start_task(task, tasks, port, *overrides) for task in range(tasks)]


@pytest.mark.slow
def test_a_killed_rank_and_a_lost_task_are_replaced(
    keys: tuple[str, ...], port: int, tmp_path: Path
) -> None:
    keys = (*keys, "checkpoint.every_steps=100")
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert train(*keys, f"run.dir={alone}").code == 0
    hold(run, 3, 6)
    tasks = start_job(
        3, port, *keys, f"run.dir={run}", "recovery.spares=1", "launch.ranks_per_node=2"
    )
    wait_for_step(run, 3)
    process_of(run, 0).kill()
    go_on(run, 3)
    wait_for_step(run, 6)
    os.kill(tasks[1].pid, signal.SIGKILL)
    go_on(run, 6)
    ended = [task.wait() for task in tasks]
    assert [end.code for end in ended] == [0, -signal.SIGKILL, 0], ended[0].text
    assert "rank 0 was killed by SIGKILL; process 3 takes its place" in ended[0].text
    assert "has not answered for" in ended[0].text
    assert [(line["rank"], line["process"]) for line in lines(run, "ranks.jsonl")] == [
        (0, 0), (1, 1), (0, 3), (1, 2),
    ]  # fmt: skip
    assert learned(run) == learned(alone)
    assert samples(run) == samples(alone)
    assert same_states(run, alone)
    pids = [line["pid"] for line in lines(run, "ranks.jsonl")]
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ranks_that_write_files_together_are_moved_together(
    keys: tuple[str, ...], port: int, tmp_path: Path
) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    keys = (*keys, "checkpoint.every_steps=100")
    assert train(*keys, "launch.ranks=4", f"run.dir={alone}").code == 0
    copies = "recovery.partner_copies=true", f"recovery.copies_path={tmp_path}/copies"
    nodes = "recovery.spares=2", "launch.ranks_per_node=2"
    hold(run, 3)
    tasks = start_job(6, port, *keys, *copies, *nodes, f"run.dir={run}")
    wait_for_step(run, 3)
    swap(run, 3)
    go_on(run, 3)
    ended = [task.wait() for task in tasks]
    assert [end.code for end in ended] == [0] * 6, ended[0].text
    moved = [(line["rank"], line["process"]) for line in lines(run, "ranks.jsonl")[4:]]
    assert moved == [(2, 4), (3, 5)]
    assert learned(run) == learned(alone)


@pytest.mark.slow
@pytest.mark.parametrize("elastic", covering([True, False], [False]))
def test_without_a_spare_the_run_shrinks_or_ends(
    elastic: bool, keys: tuple[str, ...], tmp_path: Path, port: int
) -> None:
    keys = (*keys, "checkpoint.every_steps=100", f"launch.elastic={str(elastic).lower()}")
    alone, run = tmp_path / "alone", tmp_path / "run"
    hold(run, 5)
    tasks = start_job(3, port, *keys, f"run.dir={run}", "data.global_batch=12")
    wait_for_step(run, 5)
    os.kill(tasks[2].pid, signal.SIGKILL)
    go_on(run, 5)
    ended = [task.wait() for task in tasks]
    if not elastic:
        assert [end.code for end in ended] == [1, 1, -signal.SIGKILL], ended[0].text
        assert "the run ends, because ranks are missing" in ended[0].text
        again = train(*keys, "launch.ranks=3", "data.global_batch=12", f"run.dir={run}")
        assert again.code == 0, again.text
    else:
        assert [end.code for end in ended] == [0, 0, -signal.SIGKILL], ended[0].text
        assert "the run continues on 2 instead of 3 ranks" in ended[0].text
    assert "the remaining ranks have saved step" in ended[0].text
    assert len(lines(run)) == STEPS, "no step was done twice"
    ended_alone = train(*keys, "launch.ranks=3", "data.global_batch=12", f"run.dir={alone}")
    assert ended_alone.code == 0, ended_alone.text
    for ours, theirs in zip(learned(run), learned(alone), strict=True):
        assert ours == (pytest.approx(theirs, rel=1e-4) if elastic else theirs)


def config(**recovery: object) -> RunConfig:
    from frontier_llm.cli.compose import compose

    return decode(compose([f"recovery.{key}={value}" for key, value in recovery.items()]))


def test_the_last_tasks_are_spares() -> None:
    assert ranks_of(config(enabled="true", spares=2), 10) == 8
    assert ranks_of(config(enabled="false", spares=2), 10) == 10
    assert ranks_of(config(), None) == config().launch.ranks
    with pytest.raises(ConfigError, match=r"recovery.spares"):
        ranks_of(config(enabled="true", spares=10), 10)
