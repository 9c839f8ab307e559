"""The launcher of local ranks: it prints one cause, has its exit code and leaves no process."""

import contextlib
import faulthandler
import json
import os
import pty
import signal
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from frontier_llm.errors import DataError, LaunchError, StopRequested
from frontier_llm.launch.forked_ranks import LaunchOptions
from frontier_llm.launch.rendezvous import init_process_group, listen
from frontier_llm.launch.stop import _SAME_KEY_SECONDS, STOP_SIGNALS, ParentSignals, StopFlag
from frontier_llm.membership.launcher import launch
from frontier_llm.membership.member import once
from tests.patience import patient, wait_until
from tests.ports import reserved_port

PATIENT = timedelta(minutes=5)


def _join(world, store):
    init_process_group(world, store, "gloo", PATIENT)


def _launch(target, ranks, folder, **options):
    options = LaunchOptions(ranks=ranks, failure_dir=folder / "failures", **options)
    return launch(once(target), options).exit_code


@dataclass
class Job:
    """A launcher in a forked process, with its own process group."""

    pid: int
    folder: Path

    def wait(self):
        """Return the exit code; < 0 is a signal."""
        _, status = wait_until(self._ended, lambda: f"the end: {self.stderr()}")
        return os.waitstatus_to_exitcode(status)

    def _ended(self):
        ended = os.waitpid(self.pid, os.WNOHANG)
        return ended if ended[0] else None

    def wait_for_ranks(self, size):
        """Wait until each rank has written its process id."""
        wait_until(lambda: len(self.ranks()) >= size, self.stderr)

    def ranks(self):
        return [int(path.read_text()) for path in self.folder.glob("*.pid")]

    def alive(self):
        return [pid for pid in self.ranks() if _runs(pid)]

    def stderr(self):
        return (self.folder / "stderr").read_text()


@pytest.fixture
def job(tmp_path):
    started = []

    def start(target, ranks):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
            with (tmp_path / "stderr").open("w", buffering=1) as sys.stderr:
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


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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


def _user_error_and_a_bug(world, store):
    if world.rank == 0:
        # rank 0 serves the store, so rank 1 would lose contact if it failed earlier
        store.wait(["rank 1 is connected"])
        raise ZeroDivisionError("a bug")
    store.set("rank 1 is connected", "")
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
    threading.Event().wait()


def _absent_from_a_collective(world, store):
    _join(world, store)
    _set_pg_timeout(timedelta(seconds=patient(0.25)))
    if world.rank == 1:
        threading.Event().wait()
    dist.all_reduce(torch.ones(1))


def _rank_zero_dies_early(world, store):
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    store.wait(["never"], timedelta(seconds=30))


def _exit_without_a_message(world, store):
    if world.rank == 1:
        os._exit(7)
    store.wait(["never"], timedelta(seconds=30))


def _all_stop(world, store):
    raise StopRequested("stopped at step 7")


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("frontier_llm.membership.coordinator.PATIENCE_SECONDS", patient(0.25))
    monkeypatch.setattr("frontier_llm.membership.coordinator.TERMINATION_SECONDS", 0.3)


@pytest.fixture
def hasty(monkeypatch):
    """The other ranks would wait for ever, so that nothing comes of waiting for them."""
    monkeypatch.setattr("frontier_llm.membership.coordinator.PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr("frontier_llm.membership.coordinator.TERMINATION_SECONDS", 0.3)


# One cause, printed once


def test_ranks_meet_and_end_well(tmp_path, capfd):
    assert _launch(_sum, 4, tmp_path) == 0
    assert capfd.readouterr().err == ""
    assert not (tmp_path / "failures").exists()


def test_a_single_rank_goes_the_same_way(tmp_path):
    assert _launch(_sum, 1, tmp_path) == 0


def test_a_bug_shows_the_traceback_of_its_rank_alone(tmp_path, capfd):
    assert _launch(_broken_first_rank, 4, tmp_path) == 1
    text = capfd.readouterr().err
    assert text.count("Traceback") == 1
    assert "rank 1 failed first" in text
    assert "_broken_first_rank" in text
    assert text.rstrip().endswith("ZeroDivisionError: rank one divided by nothing")


def test_every_rank_writes_its_failure(tmp_path):
    _launch(_broken_first_rank, 3, tmp_path)
    kinds = {
        path.name: json.loads(path.read_text())["kind"]
        for path in (tmp_path / "failures").glob("rank_*.json")
    }
    assert kinds == {
        "rank_0.json": "lost_contact",
        "rank_1.json": "error",
        "rank_2.json": "lost_contact",
    }


def test_an_error_for_users_has_no_traceback_and_comes_before_bugs(tmp_path, capfd, monkeypatch):
    # on a busy machine a rank may begin seconds after the other has failed
    monkeypatch.setattr("frontier_llm.membership.coordinator.PATIENCE_SECONDS", 60.0)
    assert _launch(_user_error_and_a_bug, 2, tmp_path) == 1
    assert capfd.readouterr().err == "the corpus is gone: set data.path=\n"


def test_a_killed_rank_is_named_with_its_likely_reason(tmp_path, capfd):
    assert _launch(_out_of_memory, 4, tmp_path) == 1
    text = capfd.readouterr().err
    assert "rank 2 was killed by SIGKILL, probably for lack of memory" in text
    assert "Traceback" not in text


def test_a_crash_is_named_and_ends_ranks_that_sleep(tmp_path, capfd, hasty):
    """They would sleep for ever."""
    assert _launch(_crash, 3, tmp_path) == 1
    assert "rank 1 was killed by SIGSEGV" in capfd.readouterr().err


@pytest.mark.slow
def test_a_rank_that_did_not_join_a_collective_is_named(tmp_path, capfd, impatient):
    assert _launch(_absent_from_a_collective, 3, tmp_path) == 1
    text = capfd.readouterr().err
    assert "a collective timed out: ranks 0, 2 waited, rank 1 did not join" in text
    assert "Traceback" not in text


@pytest.mark.exhaustive
def test_losing_the_store_is_not_the_cause(tmp_path, capfd, impatient):
    assert _launch(_rank_zero_dies_early, 3, tmp_path) == 1
    assert "rank 0 was killed by SIGKILL" in capfd.readouterr().err


def test_a_rank_that_exits_without_a_message_is_named(tmp_path, capfd, hasty):
    assert _launch(_exit_without_a_message, 2, tmp_path) == 1
    assert "rank 1 ended with exit code 7" in capfd.readouterr().err


def test_a_requested_stop_has_its_own_code_and_one_message(tmp_path, capfd):
    assert _launch(_all_stop, 3, tmp_path) == 3
    assert capfd.readouterr().err == "stopped at step 7\n"
    assert not (tmp_path / "failures").exists(), "a stop is no failure"


def test_a_taken_port_starts_nothing(tmp_path):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} .* in use: set launch.port "):
            _launch(_sum, 2, tmp_path, port=port)


def test_the_port_is_free_again_after_a_run(tmp_path):
    with reserved_port() as port:
        assert _launch(_sum, 2, tmp_path, port=port) == 0
        assert _launch(_sum, 2, tmp_path, port=port) == 0


def test_failures_of_an_earlier_attempt_are_ignored(tmp_path, capfd):
    _launch(_user_error_and_a_bug, 2, tmp_path)
    capfd.readouterr()
    assert _launch(_sum, 2, tmp_path) == 0
    assert capfd.readouterr().err == ""


# Signals


def _polling(folder):
    def target(world, store):
        flag = StopFlag.install()
        _note_pid(folder, world)
        while not flag.requested:
            time.sleep(0.01)
        raise StopRequested(f"stopped on {flag.reason}")

    return target


def _stubborn(folder):
    def target(world, store):
        _note_pid(folder, world)
        threading.Event().wait()

    return target


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_to_the_parent_stops_every_rank(job, tmp_path, number):
    running = job(_polling(tmp_path), 3)
    running.wait_for_ranks(3)
    os.kill(running.pid, number)
    assert running.wait() == 3
    assert running.alive() == []
    assert running.stderr().rstrip().endswith("stopped on Ctrl-C or SIGTERM")


def test_ctrl_c_in_a_terminal_stops_every_rank(job, tmp_path):
    running = job(_polling(tmp_path), 3)
    running.wait_for_ranks(3)
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait() == 3
    assert "Traceback" not in running.stderr()


def test_a_closed_terminal_stops_every_rank_and_its_output_is_no_error(tmp_path):
    def target(world, store):
        _note_pid(tmp_path, world)
        while not (flag := StopFlag.install()).requested:
            time.sleep(0.01)
        for _ in range(3):
            sys.stdout.write("saving\n")  # fails with EIO on a terminal that is gone
            sys.stdout.flush()
        (tmp_path / f"saved_{world.rank}").touch()
        raise StopRequested(f"stopped on {flag.reason}")

    pid, terminal = pty.fork()
    if not pid:
        code = 70
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        try:
            code = _launch(target, 2, tmp_path)
        finally:
            os._exit(code)
    running = Job(pid, tmp_path)
    wait_until(lambda: len(running.ranks()) == 2, "the ranks")
    os.close(terminal)  # the kernel sends SIGHUP
    _, status = wait_until(running._ended, "the end")
    assert os.waitstatus_to_exitcode(status) == 3
    assert len(list(tmp_path.glob("saved_*"))) == 2


def test_a_stop_signal_that_is_ignored_stays_ignored(monkeypatch):
    """As SIGHUP under nohup."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with ParentSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert not signals.take_stop()
        flag = StopFlag.install()
        signal.raise_signal(signal.SIGHUP)
        assert not flag.requested
        signal.raise_signal(signal.SIGUSR1)
        assert flag.requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_failure_that_no_disk_takes_is_still_the_cause(job, tmp_path, hasty):
    def target(world, store):
        if world.rank == 1:
            raise DataError("the disk of the corpus is full")
        threading.Event().wait()

    (tmp_path / "failures").symlink_to("/proc/nothing")  # no folder can be made
    running = job(target, 2)
    assert running.wait() == 1
    assert running.stderr().rstrip().endswith("the disk of the corpus is full")


def test_a_second_ctrl_c_kills_at_once(job, tmp_path):
    running = job(_stubborn(tmp_path), 3)
    running.wait_for_ranks(3)
    os.killpg(running.pid, signal.SIGINT)
    wait_until(lambda: "Ctrl-C once more" in running.stderr(), "the answer to the first one")
    time.sleep(2 * _SAME_KEY_SECONDS)
    assert len(running.alive()) == 3, "they do not end by themselves"
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait() == 130
    assert running.alive() == []


@pytest.mark.exhaustive
def test_a_rank_that_is_killed_while_stopping_is_a_failure(job, tmp_path, impatient):
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
    assert "rank 1 was killed by SIGKILL" in running.stderr()


def test_a_ctrl_c_that_make_forwards_counts_once(job, tmp_path, monkeypatch):
    monkeypatch.setattr("frontier_llm.launch.stop._SAME_KEY_SECONDS", 3600.0)
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
    wait_until(lambda: running.alive() == [], "the end of the ranks")


def test_a_signal_before_the_loop_starts_is_not_lost(job, tmp_path):
    def slow_start(world, store):
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        _note_pid(tmp_path, world)
        os.read(reader, 1)  # a signal has arrived while the model is built
        if StopFlag.install().requested:
            raise StopRequested("stopped before the first step")

    running = job(slow_start, 2)
    running.wait_for_ranks(2)
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait() == 3
