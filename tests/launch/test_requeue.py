"""What an agent does when the node of the job script is lost; Slurm's programs are stand-ins.

benchmarks/faults/reliability.py tries the same on a real Slurm.
"""

import os
import socket
from pathlib import Path

import pytest

from frontier_llm.launch import requeue
from frontier_llm.launch.requeue import end_job_without_script
from tests.ports import reserved_port

RUNS = "JobState=RUNNING Restarts=0"
PROGRAM = """#!/bin/bash
echo "$(basename "$0") $*" >> "{folder}/calls"
case "$*" in
  --noheader*) echo "down*" ;;
  "--oneliner show job"*)
    if grep -q requeue "{folder}/calls"; then state="{after}"; else state="{before}"; fi
    echo "JobId=7 $state StdOut={folder}/log BatchHost=node1" ;;
  requeue*) exit {requeue} ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "log").write_text("a step\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def lose_script(
    folder: Path, *, requeue: int = 0, states: tuple[str, str] = (RUNS, RUNS), **variables: str
) -> list[str]:
    """Call the function on the second node; return the calls of Slurm's programs.

    Args:
        folder: receives the programs and the list of their calls.
        requeue: exit code of `scontrol requeue`.
        states: what Slurm shows of the job before and after that.
        variables: variables of the task.
    """
    before, after = states
    for name in ("sinfo", "scontrol", "scancel"):
        text = PROGRAM.format(folder=folder, requeue=requeue, before=before, after=after)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    task = {
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-3]",
        "SLURM_SRUN_COMM_HOST": "127.0.0.1",
    }
    with reserved_port() as closed:
        end_job_without_script({**task, "SLURM_SRUN_COMM_PORT": str(closed), **variables})
    calls = folder / "calls"
    return calls.read_text().splitlines() if calls.exists() else []


def test_the_job_is_requeued_as_often_as_allowed(folder: Path) -> None:
    limit = {"FRONTIER_LLM_REQUEUES": "2", "SLURM_RESTART_COUNT": "1"}
    assert lose_script(folder, **limit) == [
        "sinfo --noheader --nodes=node1 --format=%T",
        "scontrol --oneliner show job 7",
        "scontrol requeue 7",
    ]
    log = (folder / "log").read_text()
    assert log.startswith("a step\nnode node1 is lost, and with it task 0 and the job script")
    assert "into the queue again (2 of 2 times, FRONTIER_LLM_REQUEUES)" in log


def test_otherwise_the_job_is_cancelled(folder: Path) -> None:
    limit = {"FRONTIER_LLM_REQUEUES": "2", "SLURM_RESTART_COUNT": "2"}
    assert lose_script(folder, **limit)[-1] == "scancel 7"
    assert "The job is cancelled" in (folder / "log").read_text()


def test_a_job_that_cannot_be_requeued_is_cancelled(folder: Path) -> None:
    calls = lose_script(folder, requeue=1, FRONTIER_LLM_REQUEUES="1")
    assert calls[-3:] == ["scontrol requeue 7", "scontrol --oneliner show job 7", "scancel 7"]


@pytest.mark.parametrize("states", [(RUNS, "JobState=PENDING Restarts=1"),
                                    ("JobState=RUNNING Restarts=1", RUNS)])  # fmt: skip
def test_a_job_that_another_agent_has_requeued_is_not_cancelled(
    states: tuple[str, str], folder: Path
) -> None:
    calls = lose_script(folder, requeue=1, states=states, FRONTIER_LLM_REQUEUES="1")
    assert "scancel 7" not in calls


def test_nothing_is_done_if_srun_answers(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as srun:
        assert not lose_script(folder, SLURM_SRUN_COMM_PORT=str(srun.getsockname()[1]))


@pytest.mark.parametrize("task", [{"SLURM_LOCALID": "1"}, {"SLURM_NODEID": "0"},
                                  {"SLURM_NODEID": "9"}])  # fmt: skip
def test_one_agent_of_the_first_nodes_acts(task: dict[str, str], folder: Path) -> None:
    assert not lose_script(folder, **task)


def test_the_agent_of_the_second_node_waits_for_the_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("_ASK", 0.05), ("_PATIENCE", 0.3), ("_TURN", 3600.0)):
        monkeypatch.setattr(requeue, f"{name}_SECONDS", seconds)
    calls = lose_script(folder, SLURM_NODEID="2", FRONTIER_LLM_REQUEUES="1")
    assert calls
    assert all(call.startswith("sinfo") for call in calls)
