"""The parent of local ranks: one cause on the screen, the right exit code, nobody left behind."""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from frontier_llm.errors import DataError, LaunchError, StopRequested
from frontier_llm.parallel.launcher import Launch, launch
from frontier_llm.parallel.stop import StopFlag
from frontier_llm.parallel.world import init_process_group, listen

PATIENT = timedelta(seconds=60)


def _join(world, store, timeout=PATIENT):
    init_process_group(world, store, torch.device("cpu"), timeout)


def _launch(target, ranks, folder, **options):
    return launch(target, Launch(ranks=ranks, failure_dir=folder / "failures", **options))


@dataclass
class Job:
    """A parent of ranks that runs beside the test, in a process group of its own."""

    pid: int
    folder: Path

    def wait(self, timeout=15.0):
        """Return the exit code; < 0 is a signal."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        raise AssertionError(f"still running: {self.said()}")

    def wait_for_ranks(self, size):
        """Wait until each rank has written its process id."""
        deadline = time.monotonic() + 10
        while len(self.ranks()) < size:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.01)

    def ranks(self):
        return [int(path.read_text()) for path in self.folder.glob("*.pid")]

    def alive(self):
        return [
            pid
            for pid in self.ranks()
            if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        ]

    def said(self):
        return (self.folder / "stderr").read_text()


@pytest.fixture
def job(tmp_path):
    started = []

    def start(target, ranks):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            with (tmp_path / "stderr").open("w") as sys.stderr:
                os._exit(_launch(target, ranks, tmp_path))
        started.append(Job(pid, tmp_path))
        return started[-1]

    yield start
    for running in started:
        for pid in [running.pid, *running.ranks()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(running.pid, 0)


def _note_pid(folder, world):
    part = folder / f"{world.rank}.part"
    part.write_text(str(os.getpid()))
    part.rename(folder / f"{world.rank}.pid")


# What ranks do


def _sum(world, store):
    _join(world, store)
    tensor = torch.tensor([1.0 + world.rank])
    dist.all_reduce(tensor)
    assert tensor.item() == world.size * (world.size + 1) / 2


def _broken_first_rank(world, store):
    _join(world, store)
    if world.rank == 1:
        time.sleep(0.2)
        raise ZeroDivisionError("rank one divided by nothing")
    dist.all_reduce(torch.ones(1))


def _user_error_beside_a_bug(world, store):
    if world.rank == 0:
        raise ZeroDivisionError("a bug")
    time.sleep(0.2)
    raise DataError("the corpus is gone: set data.path=")


def _out_of_memory(world, store):
    _join(world, store)
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def _crash(world, store):
    if world.rank == 1:
        faulthandler.disable()  # of the test runner
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)


def _absent_from_a_collective(world, store):
    _join(world, store, timedelta(seconds=1))
    if world.rank == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


def _rank_zero_dies_early(world, store):
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    store.wait(["never"], timedelta(seconds=30))


def _leave_without_a_word(world, store):
    if world.rank == 1:
        os._exit(7)
    store.wait(["never"], timedelta(seconds=30))


def _all_stop(world, store):
    raise StopRequested("stopped at step 7")


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("frontier_llm.parallel.launcher.PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr("frontier_llm.parallel.launcher.TERMINATION_SECONDS", 0.3)


# One cause, said once


def test_ranks_meet_and_end_well(tmp_path, capfd):
    assert _launch(_sum, 4, tmp_path) == 0
    assert capfd.readouterr().err == ""
    assert not (tmp_path / "failures").exists()


def test_a_single_rank_goes_the_same_way(tmp_path):
    assert _launch(_sum, 1, tmp_path) == 0


def test_a_bug_shows_the_traceback_of_its_rank_alone(tmp_path, capfd):
    assert _launch(_broken_first_rank, 4, tmp_path) == 1
    said = capfd.readouterr().err
    assert said.count("Traceback") == 1
    assert "rank 1 failed first" in said
    assert "_broken_first_rank" in said
    assert said.rstrip().endswith("ZeroDivisionError: rank one divided by nothing")


def test_every_ranks_own_story_can_be_read(tmp_path):
    _launch(_broken_first_rank, 3, tmp_path)
    kinds = {
        path.name: json.loads(path.read_text())["kind"]
        for path in (tmp_path / "failures").glob("rank_*.json")
    }
    assert kinds == {"rank_0.json": "echo", "rank_1.json": "error", "rank_2.json": "echo"}


def test_an_error_for_users_has_no_traceback_and_comes_before_bugs(tmp_path, capfd, monkeypatch):
    # on a busy machine a rank may begin seconds after the other has failed
    monkeypatch.setattr("frontier_llm.parallel.launcher.PATIENCE_SECONDS", 60.0)
    assert _launch(_user_error_beside_a_bug, 2, tmp_path) == 1
    assert capfd.readouterr().err == "the corpus is gone: set data.path=\n"


def test_a_killed_rank_is_named_with_its_likely_reason(tmp_path, capfd):
    started = time.monotonic()
    assert _launch(_out_of_memory, 4, tmp_path) == 1
    said = capfd.readouterr().err
    assert "rank 2 was killed by SIGKILL: probably out of memory" in said
    assert "Traceback" not in said
    assert time.monotonic() - started < 4


def test_a_crash_is_named_and_ends_ranks_that_sleep(tmp_path, capfd, impatient):
    started = time.monotonic()
    assert _launch(_crash, 3, tmp_path) == 1
    assert "rank 1 was killed by SIGSEGV" in capfd.readouterr().err
    assert time.monotonic() - started < 5


def test_a_rank_that_did_not_come_to_a_collective_is_named(tmp_path, capfd, impatient):
    assert _launch(_absent_from_a_collective, 3, tmp_path) == 1
    said = capfd.readouterr().err
    assert "a collective timed out: ranks 0, 2 waited, rank 1 did not come" in said
    assert "Traceback" not in said


def test_losing_the_store_is_not_taken_for_the_cause(tmp_path, capfd, impatient):
    assert _launch(_rank_zero_dies_early, 3, tmp_path) == 1
    assert "rank 0 was killed by SIGKILL" in capfd.readouterr().err


def test_a_rank_that_leaves_without_a_word(tmp_path, capfd, impatient):
    assert _launch(_leave_without_a_word, 2, tmp_path) == 1
    assert "rank 1 ended with exit code 7" in capfd.readouterr().err


def test_stopping_in_order_has_its_own_code_and_one_message(tmp_path, capfd):
    assert _launch(_all_stop, 3, tmp_path) == 3
    assert capfd.readouterr().err == "stopped at step 7\n"


def test_a_taken_port_starts_nothing(tmp_path):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} .* in use: set launch.port="):
            _launch(_sum, 2, tmp_path, port=port)


def test_the_port_is_free_again_after_a_run(tmp_path):
    with listen("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    assert _launch(_sum, 2, tmp_path, port=port) == 0
    assert _launch(_sum, 2, tmp_path, port=port) == 0


def test_what_an_earlier_attempt_left_is_not_the_cause_of_this_one(tmp_path, capfd):
    _launch(_user_error_beside_a_bug, 2, tmp_path)
    capfd.readouterr()
    assert _launch(_sum, 2, tmp_path) == 0
    assert capfd.readouterr().err == ""


# Signals


def _polling(folder):
    def target(world, store):
        flag = StopFlag.install()
        _note_pid(folder, world)
        for _ in range(3000):
            if flag.requested:
                raise StopRequested(f"stopped on {flag.reason}")
            time.sleep(0.01)

    return target


def _stubborn(folder):
    def target(world, store):
        _note_pid(folder, world)
        time.sleep(60)

    return target


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_request_to_the_parent_stops_every_rank_in_order(job, tmp_path, number):
    running = job(_polling(tmp_path), 3)
    running.wait_for_ranks(3)
    os.kill(running.pid, number)
    assert running.wait() == 3
    assert running.alive() == []
    assert running.said().rstrip().endswith("stopped on SIGTERM")


def test_ctrl_c_at_a_terminal_reaches_all_and_stops_them_in_order(job, tmp_path):
    running = job(_polling(tmp_path), 3)
    running.wait_for_ranks(3)
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait() == 3
    assert "Traceback" not in running.said()


def test_a_second_ctrl_c_kills_at_once(job, tmp_path):
    running = job(_stubborn(tmp_path), 3)
    running.wait_for_ranks(3)
    os.killpg(running.pid, signal.SIGINT)
    time.sleep(0.5)
    assert len(running.alive()) == 3
    started = time.monotonic()
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait() == 130
    assert time.monotonic() - started < 1
    assert running.alive() == []


def test_dying_while_stopping_is_not_an_orderly_stop(job, tmp_path, impatient):
    def target(world, store):
        _note_pid(tmp_path, world)
        while not StopFlag.install().requested:
            time.sleep(0.01)
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise StopRequested("stopped")

    running = job(target, 2)
    running.wait_for_ranks(2)
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait() == 1
    assert "rank 1 was killed by SIGKILL" in running.said()


def test_the_same_ctrl_c_handed_on_twice_is_one_request(job, tmp_path):
    running = job(_polling(tmp_path), 2)
    running.wait_for_ranks(2)
    os.killpg(running.pid, signal.SIGINT)
    time.sleep(0.05)
    os.kill(running.pid, signal.SIGINT)
    assert running.wait() == 3


def test_killing_the_parent_leaves_no_orphan(job, tmp_path):
    running = job(_stubborn(tmp_path), 4)
    running.wait_for_ranks(4)
    os.kill(running.pid, signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while running.alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert running.alive() == []


def test_a_request_before_the_loop_begins_is_not_lost(job, tmp_path):
    def slow_start(world, store):
        _note_pid(tmp_path, world)
        time.sleep(0.5)  # building a model
        if StopFlag.install().requested:
            raise StopRequested("stopped before the first step")

    running = job(slow_start, 2)
    running.wait_for_ranks(2)
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait() == 3
