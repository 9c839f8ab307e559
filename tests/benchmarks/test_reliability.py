"""What the fault experiments read and write; the experiments need Slurm and many minutes."""

import json
import re
import signal
import time
from pathlib import Path

import pytest

from benchmarks.faults import reliability
from benchmarks.faults.slurm_lab import cluster as lab
from benchmarks.faults.slurm_lab.fault_cases import FAULTS, REPLACED, Fault
from benchmarks.faults.slurm_lab.jobs import losses_of
from docs.generate.blocks import load
from frontier_llm.errors import LaunchError
from frontier_llm.health.diagnosis import (
    Phase,
    RankState,
    explain_loss,
    explain_lost_store,
    explain_stall,
)
from frontier_llm.launch.stop import Deadline, StopFlag, StopRequest, stop_message
from frontier_llm.launch.world import World


def test_a_row_says_whether_the_cause_was_named():
    killed, cut = (Fault("f", lambda job: None, culprit) for culprit in ("rank 3", ""))
    assert reliability.named(killed, "the rank 3 is gone") == "rank 3"
    assert reliability.named(killed, "something ended") == "not named"
    assert reliability.named(cut, "rank 3") is None  # the fault has none


@pytest.mark.parametrize("experiment", ["faults", "replaced"])
def test_results_have_the_keys_of_the_published_files(experiment):
    assert reliability.result(experiment, {"rows": []}).keys() == load(experiment).keys()


def test_the_output_shows_from_which_step_each_start_was_resumed():
    output = (
        "x resumed    step 40 of runs/a/checkpoints/step_40; validation\nresumed    step 60 of b"
    )
    assert reliability._resumptions(output) == [40, 60]


def test_the_incomplete_last_line_of_a_file_is_ignored(tmp_path):
    lines = [json.dumps({"step": step, "loss": 1.0 / step}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 3, "lo']))
    assert losses_of(tmp_path) == {1: 1.0, 2: 0.5}
    assert losses_of(tmp_path / "nothing") == {}


WORLD = World(1, 4, 1, 2, "node1", "slurm", "node1", 1, "job", ("node1", "node2"))
STEP = Phase("step", 26, time.monotonic(), 20.0)


def stopped(stop: StopRequest) -> str:
    """Return the message of a run that was asked to stop."""
    assert stop.look()
    return stop_message(25, stop.reason, "runs/a", is_saved=True)


def signalled(number: int) -> str:
    flag = StopFlag()
    flag(number, None)
    return stopped(StopRequest(flag))


def states(*answering: int) -> dict[int, RankState]:
    """Return the states of the ranks that report."""
    return {
        rank: RankState(rank, f"node{1 + rank // 2}", "step", 26, 21.0, None, ("a.wait()",))
        for rank in answering
    }


def stalled(*answering: int) -> str:
    """Return the message of the watchdog if only some ranks report."""
    return explain_stall(states(*answering), WORLD, STEP, "stall.txt")


def message_about(fault: str, folder: Path) -> str:
    """Return the message of the program about a fault."""
    match fault:
        case "pre-emption":
            return signalled(signal.SIGTERM)
        case "`scancel --signal=USR1`" | "time limit (`--signal=USR1@60`)":
            return signalled(signal.SIGUSR1)
        case "rank killed by -9":
            return explain_loss(states(0, 1, 2), WORLD, "Connection closed", "stall.txt")
        case "rank hangs (SIGSTOP)":
            return stalled(0, 1, 2)
        case "link cut" | "node lost (slurmd and all)":
            return stalled(0, 1)
        case "rank 0 hangs (SIGSTOP)":
            return explain_lost_store(WORLD, STEP, None)
        case "STOP file":
            (folder / "STOP").touch()
            return stopped(StopRequest(StopFlag(), folder / "STOP"))
        case "time limit (no signal)":
            return stopped(StopRequest(StopFlag(), None, Deadline(time.time() + 60, 120.0)))
    raise AssertionError(f"{fault}: its message is missing here")


def test_the_program_names_the_cause_of_every_fault(tmp_path):
    for faults in (FAULTS, REPLACED):
        assert len({fault.name for fault in faults}) == len(faults)
    for fault in FAULTS:
        if fault.culprit:
            assert re.search(fault.culprit, message_about(fault.name, tmp_path)), fault.name


def test_the_steps_of_an_elastic_run_follow_each_other(tmp_path, monkeypatch):
    ends, trained = {}, []

    def train(run_dir, ranks, until):
        trained.append(run_dir)
        ends[run_dir] = until
        return 12 // ranks

    def ledger(run_dir):
        return {step: ("a", 1.0) for step in range(1, ends[run_dir] + 1)}

    monkeypatch.setattr(reliability, "_train", train)
    monkeypatch.setattr(reliability, "_ledger", ledger)
    rows = reliability.elastic(tmp_path)
    assert rows[0].keys() == load("elastic")["rows"][0].keys()
    assert [row["steps"] for row in rows] == ["1 to 25", "26 to 60", "61 to 100"]
    assert len(set(trained)) == 2


def test_without_slurm_nothing_is_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "kept").touch()
    with (
        pytest.raises(LaunchError, match="not installed: munged"),
        lab.SlurmCluster(tmp_path, 2, 4, 2, tmp_path / "local"),
    ):
        pass
    assert (tmp_path / "kept").exists()
