"""What the proofs of reliability read and write; the proofs themselves need a Slurm and minutes."""

import json
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from frontier_llm.errors import LaunchError
from frontier_llm.parallel.stall import Phase, RankState, explain, explain_loss
from frontier_llm.parallel.stop import Deadline, StopFlag, StopRequest
from frontier_llm.parallel.watchdog import Watchdog
from frontier_llm.parallel.world import World
from frontier_llm.trainer.loop import Loop
from tools import reliability
from tools.reliability import Outcome
from tools.slurm_lab import cluster as lab
from tools.slurm_lab.faults import FAULTS
from tools.slurm_lab.jobs import losses_of

SEEN = Outcome("rank killed", 3.2, "failed, exit code 1", 12.0, 20, 7, "rank 3", True, 0.0)


def test_the_table_says_who_was_named_and_who_was_not():
    unnamed = Outcome("link cut", 61.0, "requeued", 12.0, 20, 7, "", False, 1e-3)
    rows = reliability._table([SEEN, unnamed]).splitlines()
    assert rows[2] == ("| rank killed | 3.2 s | failed, exit code 1 | 12.0 s | 7 | `rank 3` | 0 |")
    assert "**not named**" in rows[3]
    assert rows[3].endswith("| 0.001 |")


def test_each_start_of_a_job_says_where_it_went_on():
    said = "x resumed    step 40 of runs/a/checkpoints/step_40; validation\nresumed    step 60 of b"
    assert reliability._resumptions(said) == [40, 60]


def test_the_last_line_of_a_file_being_written_is_left_out(tmp_path):
    lines = [json.dumps({"step": step, "loss": 1.0 / step}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 3, "lo']))
    assert losses_of(tmp_path) == {1: 1.0, 2: 0.5}
    assert losses_of(tmp_path / "nothing") == {}


WORLD = World(1, 4, 1, 2, "node1", "slurm", "node1", 1, "job", ("node1", "node2"))
STEP = Phase("step", 26, time.monotonic(), 20.0)


def stopped(stop: StopRequest) -> str:
    """What a run says that was asked to stop."""
    assert stop.look()
    config = SimpleNamespace(
        checkpoint=SimpleNamespace(mode="sync"), run=SimpleNamespace(dir="runs/a")
    )
    progress, parts = SimpleNamespace(step=25), SimpleNamespace(stop=stop)
    return Loop._farewell(SimpleNamespace(_config=config, _progress=progress, _parts=parts))


def signalled(number: int) -> str:
    flag = StopFlag()
    flag(number, None)
    return stopped(StopRequest(flag))


def states(*answering: int) -> dict[int, RankState]:
    """What the ranks that answer say."""
    return {
        rank: RankState(rank, f"node{1 + rank // 2}", "step", 26, 21.0, None, ("a.wait()",))
        for rank in answering
    }


def stalled(*answering: int) -> str:
    """What the watchdog says of a stall while only some ranks answer."""
    return explain(states(*answering), WORLD, STEP, "stall.txt")


def said_of(fault: str, folder: Path) -> str:
    """What the program says of a fault, in its own words."""
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
            return Watchdog._without_store(SimpleNamespace(_world=WORLD), STEP)
        case "STOP file":
            (folder / "STOP").touch()
            return stopped(StopRequest(StopFlag(), folder / "STOP"))
        case "time limit (no signal)":
            return stopped(StopRequest(StopFlag(), None, Deadline(time.time() + 60, 120.0)))
    raise AssertionError(f"{fault}: its sentence is missing here")


def test_every_faults_culprit_is_what_the_program_says(tmp_path):
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        if fault.culprit:
            assert re.search(fault.culprit, said_of(fault.name, tmp_path)), fault.name


def test_each_elastic_proof_has_a_folder_of_its_own(tmp_path, monkeypatch):
    ends, trained = {}, []

    def train(run_dir, ranks, until):
        trained.append(run_dir)
        ends[run_dir] = until
        return 12 // ranks

    def ledger(run_dir):
        return {step: {"digest": "a", "loss": 1.0} for step in range(1, ends[run_dir] + 1)}

    monkeypatch.setattr(reliability, "_train", train)
    monkeypatch.setattr(reliability, "_ledger", ledger)
    assert reliability.elastic(tmp_path / "new") == reliability.elastic(tmp_path / "new")
    assert len(set(trained)) == 4
    assert all(tmp_path / "new" in folder.parents for folder in trained)


def test_without_slurm_nothing_is_touched(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "kept").touch()
    with (
        pytest.raises(LaunchError, match="not installed: munged"),
        lab.SlurmCluster(tmp_path, 2, 4, 2, tmp_path / "local"),
    ):
        pass
    assert (tmp_path / "kept").exists()
