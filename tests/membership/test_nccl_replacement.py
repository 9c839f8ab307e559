"""Ranks over a backend that fails as NCCL does outlive the death of another rank, or are replaced.

The launcher, the coordinator and the members are those of a run; nccl_like.py is the backend.
"""

import ctypes
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from frontier_llm.cli import train
from frontier_llm.cli.replaceable import ranks_of
from frontier_llm.config import decode
from frontier_llm.errors import ConfigError, LaunchError
from frontier_llm.health.preflight import check_groups, collective_trial
from frontier_llm.launch.cores import SURVIVAL, prepare_environment
from frontier_llm.launch.forked_ranks import LaunchOptions
from frontier_llm.launch.rendezvous import init_process_group
from frontier_llm.membership import member as membership_module
from frontier_llm.membership.coordinator import Replacing
from frontier_llm.membership.launcher import launch
from frontier_llm.membership.member import Membership, Place
from frontier_llm.parallel.groups import abort_groups, destroy_groups, forget_groups
from tests.covering import exhaustive
from tests.health import nccl_like
from tests.patience import patient
from tests.values import tiny_values

CONFIG = decode(tiny_values("recovery.enabled=true"))
STEPS = 100
STEP_SECONDS = 0.01
"""All steps together take longer than the heartbeat monitor sleeps, by the clock of the stub."""
MINUTE = timedelta(minutes=1)
LIMIT_SECONDS = patient(20)
"""Nothing here takes so long unless it hangs."""


@pytest.fixture(autouse=True)
def _backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl_like.register()
    monkeypatch.setattr(nccl_like, "FOLDER", tmp_path / "communicators")
    monkeypatch.setattr(membership_module, "_NEWS_SECONDS", 10.0)
    for name in SURVIVAL:
        monkeypatch.setenv(name, "")  # restores it after the test
        monkeypatch.delenv(name)


def _abort_late() -> None:
    """Abort the groups after the watchdog thread of torch has noticed the death."""
    dist.group.WORLD._should_dump.wait(5)
    abort_groups()


def _run(
    work: Callable[[Place], None], folder: Path, abort: Callable[[], None] = abort_groups
) -> tuple[int, dict[int, list[int]]]:
    """Run `work` on three ranks; return the exit code, and the processes of each rank."""

    def member(membership: Membership) -> None:
        membership.abort = abort
        while (place := membership.next_place()) is not None:
            if place.former_size:
                membership.report_done()
                continue
            # in the name, which is there at once: the launcher may end this process at any time
            (folder / f"{place.generation}-{place.world.rank}.{os.getpid()}").touch()
            try:
                init_process_group(place.world, place.store, nccl_like.NAME, MINUTE)
                work(place)
                destroy_groups()
                membership.finish()
            except Exception as error:
                if not membership.outlives(error):
                    raise
            membership.leave()
            abort_groups()
            forget_groups()

    options = LaunchOptions(ranks=3, failure_dir=folder / "failures")
    replacing = Replacing(folder, 0, 3, patient(0.125), lambda: 0, arrival_seconds=LIMIT_SECONDS)
    ended = launch(member, options, replacing)
    processes: dict[int, list[int]] = defaultdict(list)
    for file in folder.glob("*-[012].*"):
        processes[int(file.stem[-1])].append(int(file.suffix[1:]))
    return ended.exit_code, processes


def _step(place: Place, step: int) -> None:
    """Take a step; rank 1 dies in the third one of the first generation."""
    if (place.generation, place.world.rank, step) == (0, 1, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(STEP_SECONDS)
    number = torch.tensor([1.0])
    dist.all_reduce(number)
    if number.item() != 3:
        raise dist.DistBackendError("the all-reduce was aborted")


def _preflight(place: Place) -> None:
    """Create the communicators as a run does, in a thread."""
    trials, limit = [collective_trial("whole", dist.group.WORLD)], timedelta(seconds=LIMIT_SECONDS)
    check_groups(trials, place.world, place.store, torch.device("cpu"), limit)


def _steps(place: Place) -> None:
    _preflight(place)
    for step in range(STEPS):
        _step(place, step)


def _lives(processes: dict[int, list[int]]) -> list[int]:
    return [len(set(processes[rank])) for rank in range(3)]


def test_survivors_live_and_go_on_with_the_variables(tmp_path):
    prepare_environment(1, os.environ, CONFIG)
    code, processes = _run(_steps, tmp_path, _abort_late)
    assert code == 0
    assert _lives(processes) == [1, 2, 1]


def test_without_the_variables_torch_ends_the_survivors(tmp_path):
    _, processes = _run(_steps, tmp_path, _abort_late)
    assert min(_lives(processes)) > 1


def test_error_handling_alone_lets_torch_end_the_replacement_later(tmp_path, monkeypatch):
    """It finds the announcement of the failure that made it necessary."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    _, processes = _run(_steps, tmp_path, _abort_late)
    assert len(set(processes[1])) > 2


def test_ranks_leave_preflight_when_a_rank_dies_in_it(tmp_path):
    prepare_environment(1, os.environ, CONFIG)

    def work(place):
        if (place.generation, place.world.rank) == (0, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            _preflight(place)
        except LaunchError:
            (tmp_path / "waited").touch()
            raise

    code, processes = _run(work, tmp_path)
    assert code == 0
    assert _lives(processes) == [1, 2, 1]
    assert not (tmp_path / "waited").exists(), "they waited for the time limit of preflight"


@pytest.mark.slow
@pytest.mark.parametrize(("creating", "lives"), [(0, [2, 2, 1]), *exhaustive((2, [1, 2, 1]))])
def test_a_process_that_no_abort_reaches_is_replaced(tmp_path, monkeypatch, capfd, creating, lives):
    """The main thread of a rank creates a communicator with the rank that dies.

    Rank 2 waits for the identifier from rank 1, in the store, whose connection is cut.
    """
    prepare_environment(1, os.environ, CONFIG)
    monkeypatch.setattr(membership_module, "_STUCK_SECONDS", patient(0.25))

    def work(place):
        _preflight(place)
        for step in range(STEPS):
            if (place.generation, place.world.rank, step) == (0, creating, 3):
                dist.irecv(torch.ones(1), src=1)
            _step(place, step)

    code, processes = _run(work, tmp_path)
    assert code == 0
    assert _lives(processes) == lives
    said = "[rank 0] a call of torch.distributed does not end" in capfd.readouterr().err
    assert said == (creating == 0)


@pytest.mark.exhaustive
def test_groups_that_cannot_be_aborted_end_their_process(tmp_path, monkeypatch, capfd):
    prepare_environment(1, os.environ, CONFIG)
    monkeypatch.setattr(membership_module, "_STUCK_SECONDS", patient(0.25))
    monkeypatch.setattr(membership_module, "_NEWS_SECONDS", patient(0.5))
    abort = nccl_like.NcclLike.abort

    def hang_once(group):
        with suppress(FileExistsError):
            (tmp_path / "hangs").touch(exist_ok=False)
            threading.Event().wait()
        abort(group)

    monkeypatch.setattr(nccl_like.NcclLike, "abort", hang_once)
    code, processes = _run(_steps, tmp_path)
    assert code == 0
    assert sorted(_lives(processes)) == [1, 2, 2]
    assert "] the groups cannot be aborted after another rank died" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, "1") for name in SURVIVAL] + [("TORCH_DISTRIBUTED_DEBUG", "detail")],
)
def test_another_value_of_the_user_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        ranks_of(CONFIG, 4)
    assert (caught.value.key, caught.value.got.lower()) == (name, value)
    assert ranks_of(decode(tiny_values()), 4) == 4
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")  # refused in train_as_agent
    assert ranks_of(CONFIG, 4) == 4


def test_a_run_without_recovery_changes_no_variable():
    environ: dict[str, str] = {}
    prepare_environment(1, environ, decode(tiny_values()))
    assert not set(SURVIVAL) & set(environ)


class _LaunchedError(Exception):
    pass


def test_the_variables_are_set_before_processes_are_forked(tmp_path, monkeypatch):
    """torch reads them with getenv, in the processes that the launcher forks."""
    found = {}
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p

    def launch(*_):
        found.update({name: getenv(name.encode()).decode() for name in SURVIVAL})
        raise _LaunchedError

    monkeypatch.setattr("frontier_llm.membership.launcher.launch", launch)
    monkeypatch.setattr(train, "prepare_run", lambda *_: "")
    monkeypatch.setattr(train, "lock_run_dir", lambda _: None)
    overrides = ["recovery.enabled=true", "launch.ranks=4", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(_LaunchedError):
        train.train_on_this_machine(overrides)
    assert found == SURVIVAL
