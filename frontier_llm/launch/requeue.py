"""What the agents of a Slurm job do when they have lost the node of task 0.

The job script and srun usually run on that node. If they are lost with it, nobody waits for the
agents, and with `sbatch --no-kill` Slurm would let the job keep its other nodes until its time
limit. An agent therefore puts the job into the queue again, or cancels it.
"""

import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from frontier_llm.errors import print_error
from frontier_llm.launch.slurm import hosts
from frontier_llm.launch.stop import StopFlag

_WATCHERS = 8
"""Number of nodes, after that of task 0, on which an agent acts. Each asks Slurm's controller every
few seconds, so it must not be every node of a large job."""
_ASK_SECONDS = 5.0
_PATIENCE_SECONDS = 900.0
"""How long an agent waits for Slurm to find that the node is lost. Slurm's default time limit for a
node that does not answer (SlurmdTimeout) is 300 s."""
_COMMAND_SECONDS = 30.0
_TURN_SECONDS = 2 * _COMMAND_SECONDS
"""How long the agent of a node waits for that of the node before it to act. That one may wait for
the answers to two commands."""


def end_job_without_script(environ: Mapping[str, str]) -> None:
    """Requeue or cancel the job of this task if its job script is lost.

    If srun can be reached, the job script is not lost, and this function returns at once: srun
    learns that the agents have ended, and the script decides what to do. Otherwise it waits until
    Slurm counts the node of the script as lost, so that a node that is cut off itself cannot end a
    job that goes on without it. The function returns if that does not happen.
    """
    node, is_first = int(environ.get("SLURM_NODEID", "0")), environ.get("SLURM_LOCALID") == "0"
    if not is_first or not 0 < node <= _WATCHERS:
        return
    script_host = hosts(environ.get("SLURM_JOB_NODELIST", ""))[:1]
    deadline, lost_at = time.monotonic() + _PATIENCE_SECONDS, None
    flag = StopFlag.install()
    while script_host and not flag.requested and time.monotonic() < deadline:
        if _srun_answers(environ):
            return
        if _is_down(script_host[0]):
            lost_at = lost_at or time.monotonic()
            is_my_turn = time.monotonic() - lost_at >= _TURN_SECONDS * (node - 1)
            if is_my_turn and _end_job(environ, script_host[0]):
                return
        time.sleep(_ASK_SECONDS)


def _srun_answers(environ: Mapping[str, str]) -> bool:
    host, port = environ.get("SLURM_SRUN_COMM_HOST"), environ.get("SLURM_SRUN_COMM_PORT")
    if host is None or port is None:
        return True  # the task was not started by srun
    try:
        socket.create_connection((host, int(port)), timeout=_ASK_SECONDS).close()
    except OSError:
        return False
    return True


def _is_down(host: str) -> bool:
    """Return whether Slurm counts a node as down.

    That it does not answer Slurm is not enough: if a job is requeued before its node is down, some
    releases of Slurm give it GPUs later that its steps cannot use.
    """
    code, states = _ask("sinfo", "--noheader", f"--nodes={host}", "--format=%T")
    return code == 0 and any("down" in state for state in states.split())


def _end_job(environ: Mapping[str, str], host: str) -> bool:
    """Requeue the job if FRONTIER_LLM_REQUEUES allows it, otherwise cancel it.

    Does nothing if the agent of another node has requeued it. Returns False if Slurm does not say
    whether that is so.
    """
    job, done = environ["SLURM_JOB_ID"], int(environ.get("SLURM_RESTART_COUNT", "0"))
    allowed = int(environ.get("FRONTIER_LLM_REQUEUES", "0"))
    lost = f"node {host} is lost, and with it task 0 and the job script"
    fields = _show_job(job)
    if not fields or _was_requeued(fields, done):
        return bool(fields)
    log = Path(fields["StdOut"]) if "StdOut" in fields else None
    refused = f"it was put into the queue again {done} times (FRONTIER_LLM_REQUEUES={allowed})"
    if done < allowed:
        _tell(
            f"{lost}: the job is put into the queue again ({done + 1} of {allowed} times, "
            "FRONTIER_LLM_REQUEUES), and will resume from its newest checkpoint",
            log,
        )
        code, refused = _ask("scontrol", "requeue", job)
        if code == 0:
            return True
        # a command that got no answer in time may have put the job into the queue
        fields = _show_job(job)
        if not fields or _was_requeued(fields, done):
            return bool(fields)
    _tell(
        f"{lost}. The job is cancelled, so that it does not hold its other nodes: {refused}. To "
        "continue from the newest checkpoint, submit it again with the same run.dir",
        log,
    )
    _ask("scancel", job)
    return True


def _show_job(job: str) -> dict[str, str]:
    """Return what Slurm knows of a job, by the name of the field; empty if it does not answer."""
    code, text = _ask("scontrol", "--oneliner", "show", "job", job)
    parts = [word.partition("=") for word in text.split()] if code == 0 else []
    return {name: value for name, _, value in parts}


def _was_requeued(fields: Mapping[str, str], done: int) -> bool:
    """Return whether a job that had been requeued `done` times was requeued once more."""
    state, restarts = fields.get("JobState", ""), fields.get("Restarts", "0")
    return "PENDING" in state or "REQUEUE" in state or int(restarts) > done


def _tell(text: str, log: Path | None) -> None:
    """Append a line to the output of the job, which srun can no longer do."""
    print_error(text)
    if log is not None and log.exists():
        with log.open("a") as file:
            file.write(text + "\n")


def _ask(*command: str) -> tuple[int, str]:
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_COMMAND_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return ended.returncode, (ended.stdout + ended.stderr).strip()
