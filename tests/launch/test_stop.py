"""Requests to stop a run: a signal, a file, the time limit of the job."""

import signal
import time
from datetime import datetime
from types import SimpleNamespace

import pytest

from frontier_llm.launch import stop
from frontier_llm.launch.slurm import end_of_job
from frontier_llm.launch.stop import (
    GRACE_SECONDS,
    Deadline,
    StopFlag,
    StopRequest,
    wait_for_slurm,
)


def test_without_a_request_a_run_goes_on(tmp_path):
    request = StopRequest(StopFlag(), tmp_path / "STOP", Deadline(time.time() + 1000, 60))
    assert not request.look()
    assert request.reason == ""


def test_a_signal_is_noticed_and_named():
    flag = StopFlag()
    flag(10, None)
    request = StopRequest(flag)
    assert request.look()
    assert request.reason == "SIGUSR1"


def test_the_first_signal_is_named_and_ctrl_c_by_its_key():
    """The launcher turns Ctrl-C into SIGTERM for its ranks."""
    flag = StopFlag()
    flag(signal.SIGTERM, None)
    assert flag.reason == "Ctrl-C or SIGTERM"
    flag = StopFlag()
    flag(signal.SIGINT, None)
    flag(signal.SIGTERM, None)
    assert flag.reason == StopRequest(flag).reason == "Ctrl-C"
    assert flag.is_terminated


@pytest.mark.parametrize(("later", "is_second"), [(0.1, False), (0.3, True)])
def test_two_interrupts_of_one_key_are_one(monkeypatch, later, is_second):
    """make and a terminal both send the SIGINT of a Ctrl-C."""
    times = iter([1000.0, 1000.0 + later])
    monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda: next(times)))
    with stop.ParentSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert not signals.second_interrupt
        signal.raise_signal(signal.SIGINT)
        assert signals.second_interrupt == is_second
        assert signals.take_stop()


def test_a_file_stops_a_run_once(tmp_path):
    (tmp_path / "STOP").touch()
    request = StopRequest(StopFlag(), tmp_path / "STOP")
    assert request.look()
    assert request.look(), "the request stays"
    assert request.reason == "file STOP"
    request.withdraw()
    assert not (tmp_path / "STOP").exists(), "the resumed run must not stop at once"


def test_the_end_of_the_job_leaves_time_to_save(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    request = StopRequest(StopFlag(), None, Deadline(end_seconds=2000, margin_seconds=300))
    assert not request.look()
    now = 1600.0  # 400 s left: more than the margin, but a step has just taken 600 s
    assert request.look()
    assert request.reason == "6.7 minutes left of the Slurm job"


def test_slurm_provides_the_end_of_the_job():
    assert end_of_job({"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": "1700000000"}) == 1.7e9
    assert end_of_job({}) is None


def test_squeue_provides_the_end_under_an_older_slurm(tmp_path, monkeypatch):
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho 2026-11-21T12:34:08\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert end_of_job({"SLURM_JOB_ID": "7"}) == datetime(2026, 11, 21, 12, 34, 8).timestamp()
    squeue.write_text("#!/bin/sh\necho UNLIMITED\n")
    assert end_of_job({"SLURM_JOB_ID": "7"}) is None


def test_a_preempted_rank_waits_until_slurm_ends_it(monkeypatch):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    flag = StopFlag()
    flag(signal.SIGUSR1, None)
    wait_for_slurm(flag)
    assert waited == [], "a request: the job ends with exit code 3"
    flag(signal.SIGTERM, None)
    wait_for_slurm(flag)
    assert waited == [GRACE_SECONDS], "preempted: only then is it requeued"
