"""A run that hangs ends by itself, and the rank at fault is named."""

import json
import os
import re
import signal
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from frontier_llm.config import decode
from frontier_llm.health import watchdog as module
from frontier_llm.health.watchdog import Watchdog
from frontier_llm.launch.forked_ranks import LaunchOptions
from frontier_llm.launch.rendezvous import init_process_group, make_store
from frontier_llm.launch.world import World
from frontier_llm.membership import coordinator
from frontier_llm.membership.launcher import launch
from frontier_llm.membership.member import once
from frontier_llm.units import format_seconds
from tests.covering import exhaustive
from tests.patience import patient, wait_until
from tests.ports import reserved_port
from tests.values import tiny_values

pytestmark = pytest.mark.slow

LIMIT = round(patient(0.25), 1)
CONFIG = decode(
    tiny_values(f"watchdog.step_seconds={LIMIT}", f"watchdog.first_step_seconds={LIMIT}")
).watchdog
PATIENT = timedelta(minutes=5)


@dataclass
class Job:
    """The result of ranks that stalled."""

    code: int
    stderr: str
    failures: dict
    page: str


@pytest.fixture
def stall(tmp_path, capfd, monkeypatch):
    """Run ranks under a watchdog until it ends them."""
    monkeypatch.setattr(module, "STALL_REPORT_SECONDS", patient(0.5))
    monkeypatch.setattr(module, "DIAGNOSIS_SECONDS", patient(1.5))
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.1)
    monkeypatch.setattr(coordinator, "PATIENCE_SECONDS", patient(0.125))  # for a stopped rank
    monkeypatch.setattr(coordinator, "TERMINATION_SECONDS", 0.5)

    def run(work, size=3, port=None):
        def rank(world, store):
            if port is not None:  # as under srun, rank 0 holds the store
                store = make_store(replace(world, master_port=port), PATIENT)
            init_process_group(world, store, "gloo", PATIENT)
            with Watchdog(CONFIG, world, store, tmp_path, tmp_path / "failures") as dog:
                dist.barrier()
                work(world, dog)

        ended = launch(once(rank), LaunchOptions(size, tmp_path / "failures"))
        files = (tmp_path / "failures").glob("rank_*.json")
        failures = {int(path.stem[5:]): json.loads(path.read_text()) for path in files}
        page = tmp_path / "stall.txt"
        return Job(
            ended.exit_code, capfd.readouterr().err, failures,
            page.read_text() if page.exists() else "",
        )  # fmt: skip

    return run


def _sleeping_in_python(world, dog):
    with dog.phase("step", 5):
        if world.rank == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(1))


def test_a_rank_that_is_busy_elsewhere_is_named_with_its_stack(stall):
    job = stall(_sleeping_in_python)
    assert job.code == 1
    assert f"stall: step of step 5 took longer than {format_seconds(LIMIT)}" in job.stderr
    assert "late: rank 1" in job.stderr
    assert "time.sleep(600)" in job.stderr
    assert "ranks 0, 2: step; waiting in" in job.stderr
    assert all(f"rank {rank} on" in job.page for rank in range(3))
    assert {failed["exit_code"] for failed in job.failures.values()} == {1}


def _stopped(world, dog):
    with dog.phase("step", 5):
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))


def test_a_rank_that_does_not_report_is_named(stall):
    job = stall(_stopped)
    assert job.code == 1
    assert "late: rank 2" in job.stderr
    assert "rank 2: did not report" in job.stderr


def _first_rank_stopped(world, dog):
    with dog.phase("step", 5):
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))


@pytest.mark.exhaustive
def test_without_rank_zeros_store_rank_zero_is_named(stall):
    with reserved_port() as port:
        job = stall(_first_rank_stopped, port=port)
    assert job.code == 1
    assert "the store of rank 0 at 127.0.0.1 does not answer" in job.stderr


@pytest.fixture
def without_parent(stall, monkeypatch):
    """Run ranks as srun does: no parent knows which of them is gone."""
    monkeypatch.setattr(module, "LOSS_REPORT_SECONDS", patient(0.25))
    monkeypatch.setattr(coordinator, "PATIENCE_SECONDS", patient(1.25))  # the ranks have noticed

    def run(work):
        def rank(world, dog):
            dog._world = replace(world, launcher="slurm", hosts=("node1", "node2", "node3"))
            with dog.phase("checkpoint", 5):  # whose limit is long
                work(world)

        return stall(rank)

    return run


def _killed(world):
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.ones(1), src=2 if world.rank == 0 else 0)  # rank 1's peer is alive


def test_a_killed_rank_is_named_by_the_others(without_parent):
    job = without_parent(_killed)
    assert "rank 2 (node3) is gone without an error message: killed" in job.stderr
    assert re.search(
        r"rank 0 \(node1\) noticed it: .*Connection (closed|reset) by peer", job.stderr
    )
    assert "rank 0: checkpoint (lost contact); waiting at distributed_c10d.py" in job.stderr
    assert "rank 1: checkpoint; waiting" in job.stderr
    assert "rank 0 on" in job.page
    assert "rank 1 on" in job.page
    assert "rank 2: did not report" in job.page
    assert [job.failures[rank]["kind"] for rank in (0, 1)] == ["watchdog", "lost_contact"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("[a/pair.cc:553] Connection closed by peer [h]:1. This is typical"),
         "Connection closed by peer [h]:1"),
        (ConnectionResetError(), "ConnectionResetError"),
    ],
)  # fmt: skip
def test_a_network_error_is_shortened_to_its_first_sentence(error, words):
    assert module._first_sentence(error) == words


def _mistaken(world):
    if world.rank == 2:
        raise ValueError("a bug")
    dist.all_reduce(torch.ones(1))


def test_no_diagnosis_is_made_when_a_rank_reports_its_failure(without_parent):
    job = without_parent(_mistaken)
    assert job.page == ""
    assert "ValueError: a bug" in job.stderr
    assert {rank: failed["kind"] for rank, failed in job.failures.items()} == {
        0: "lost_contact", 1: "lost_contact", 2: "error",
    }  # fmt: skip


def _patient(world, dog):
    for step in range(1, 3):
        with dog.phase("step", step):
            time.sleep(0.05)
            with dog.phase("evaluation"):
                time.sleep(1.3 * LIMIT)  # longer than a step may take
    time.sleep(0.3)


def _with_a_strangers_alarm(world, dog):
    with dog.phase("checkpoint", 5):  # whose limit is long
        if world.rank == 1:
            for rank in range(world.size):
                dog._store.set(f"watchdog/alarm/{rank}", "alarm")
            wait_until(
                lambda: not any(dog._store.check([f"watchdog/alarm/{r}"]) for r in range(3)),
                "the end of the false alarm",
            )
        dist.barrier()
    dist.barrier()


def test_an_alarm_of_a_stranger_ends_nothing(stall):
    job = stall(_with_a_strangers_alarm)
    assert job.code == 0
    assert not job.page


def test_each_phase_has_its_own_clock(stall):
    job = stall(_patient, size=2)
    assert (job.code, job.stderr, job.page) == (0, "", "")


def test_the_length_of_steps_sets_the_limit_of_the_next(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    config = decode(tiny_values("watchdog.step_seconds=0.1", "watchdog.step_factor=8")).watchdog
    world = World(0, 1, 0, 1, "h", "local", "127.0.0.1", 1)
    dog = Watchdog(config, world, dist.HashStore(), tmp_path, tmp_path)
    limits = []
    for step in range(1, 6):
        with dog.phase("step", step):
            limits.append(dog._phase.limit_seconds)
            now += 0.03
    assert limits[:3] == [config.first_step_seconds] * 3
    assert limits[3:] == pytest.approx([0.24, 0.24])


def test_a_disabled_watchdog_starts_no_thread(tmp_path):
    config = decode(tiny_values("watchdog.enabled=false")).watchdog
    world = World(0, 1, 0, 1, "h", "local", "127.0.0.1", 1)
    with Watchdog(config, world, dist.HashStore(), tmp_path, tmp_path) as dog:
        assert dog._listener is None


@pytest.mark.forked
@pytest.mark.parametrize(("at_work", "late"), [(2, [[1]]), *exhaustive((1, []))])
def test_ranks_that_have_ended_are_not_late(tmp_path, monkeypatch, at_work, late):
    """Of three ranks the last or the last two have ended, and rank 0 waits for the archive."""
    monkeypatch.setattr(module, "LOSS_REPORT_SECONDS", 0.3)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.1)
    limit = patient(0.125)
    config = decode(tiny_values(f"watchdog.startup_seconds={limit}")).watchdog
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    reports = []

    def begin(rank):
        world = World(rank, 3, rank, 3, "h", "local", "127.0.0.1", 1)
        dog = Watchdog(config, world, store.clone(), tmp_path, tmp_path, reports.append)
        return dog.__enter__()

    dogs = [begin(rank) for rank in range(3)]
    for dog in dogs[at_work:]:
        dog.__exit__(None, None, None)
    with dogs[0].phase("closing", 5):  # rank 1, if it is at work, is in an earlier step
        time.sleep(3 * limit)
        wait_until(lambda: len(reports) == len(late), "reports")
    for dog in dogs[:at_work]:
        dog.__exit__(None, None, None)
    assert [found.ranks for found in reports] == late
