"""Submit the job scripts of this repository to a simulated cluster, and read the state of jobs."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.faults.slurm_lab.cluster import SlurmCluster
from benchmarks.faults.slurm_lab.nodes import DEVICE
from benchmarks.harness import ROOT
from frontier_llm.errors import LaunchError
from frontier_llm.telemetry.history import History

SCRIPT = "scripts/a100.sbatch"
OPTIONS = (
    "--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-node=2", "--time=30",
)  # fmt: skip
"""Options of sbatch."""
OVERRIDES = (
    "cluster=cpu_laptop", "parallel.pipeline=2", "model.layers=2", "model.hidden=64",
    "model.heads=4", "data.sequence_length=64", "data.global_batch=12", "data.micro_batch=2",
    "precision=fp32", "trainer.evaluate_every_steps=null", "trainer.evaluate_batches=1",
    "trainer.sample_tokens=0", "optimizer.decay_steps=1000", "checkpoint.every_steps=10",
    "telemetry.wandb=off", "telemetry.progress=false", "watchdog.step_seconds=20",
)  # fmt: skip
PATIENCE_SECONDS = 600.0
_JOB_ID = re.compile(r"Submitted batch job (\d+)")
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


@dataclass(frozen=True)
class Job:
    """A job of Slurm."""

    cluster: SlurmCluster
    number: int
    """Job id."""
    log: Path
    """File with its output."""
    run_dir: Path
    """Run directory of the training."""

    @property
    def fields(self) -> dict[str, str]:
        """The fields of `scontrol show job`: JobState, Restarts, ExitCode and others."""
        words = self.cluster.ask("scontrol", "--oneliner", "show", "job", str(self.number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    @property
    def ended(self) -> bool:
        """Whether the job has ended and will not be requeued."""
        return self.fields["JobState"] in _ENDED

    @property
    def exit_code(self) -> int:
        """Exit code of the script."""
        return int(self.fields["ExitCode"].split(":")[0])

    @property
    def end(self) -> str:
        """State and exit code of the job."""
        return f"{self.fields['JobState'].lower()}, exit code {self.exit_code}"

    @property
    def output(self) -> str:
        """The output of the job so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each step so far."""
        return losses_of(self.run_dir)

    @property
    def steps(self) -> int:
        """Number of the last step that has been logged."""
        return max(self.losses, default=0)

    def ranks(self) -> dict[int, int]:
        """Return the process id of each running rank."""
        found = {
            int(environ.get("SLURM_PROCID", -1)): pid
            for pid, words, environ in self._processes()
            if "frontier_llm" in words and "srun" not in words[0]
        }
        return {rank: pid for rank, pid in sorted(found.items()) if rank >= 0}

    def _processes(self) -> Iterator[tuple[int, list[str], dict[str, str]]]:
        """Yield the id, the command line and the environment of every process of the job."""
        for process in psutil.process_iter(["cmdline", "environ"]):
            words, environ = process.info["cmdline"] or [], process.info["environ"] or {}
            in_lab = environ.get("SLURM_CONF") == self.cluster.environ["SLURM_CONF"]
            if in_lab and environ.get("SLURM_JOB_ID") == str(self.number):
                yield process.pid, words, environ

    def wait(self, condition: Callable[[], bool], seconds: float, goal: str) -> float:
        """Wait until a condition holds; return how long that took, in seconds.

        Args:
            condition: called until it returns True.
            seconds: time limit.
            goal: the condition in words, for the error message.

        Raises:
            LaunchError: the condition does not hold in time; the message has the last output of
                the job.
        """
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            if condition():
                return time.monotonic() - start
            time.sleep(0.2)
        raise LaunchError(
            f"job {self.number}: not {goal} within {seconds:.0f} s "
            f"({self.fields['JobState']}); its last output:\n{self.output[-3000:]}"
        )


def losses_of(run_dir: Path) -> dict[int, float]:
    """Return the loss of each step so far in a run directory."""
    return dict(History.read(run_dir).points("loss"))


def submit(
    cluster: SlurmCluster,
    options: Sequence[str],
    overrides: Sequence[str],
    run_dir: Path,
    variables: Mapping[str, str] | None = None,
) -> Job:
    """Submit the job script to Slurm as a user does, with more environment variables.

    The output file is in the parent of the run directory.

    Raises:
        LaunchError: sbatch rejected the job.
    """
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    output = f"{run_dir.parent}/{run_dir.name}-%j.out"
    command = ["sbatch", f"--output={output}", *options, SCRIPT, *overrides, f"run.dir={run_dir}"]
    environ = {
        **os.environ,
        **cluster.environ,
        "USER": os.environ.get("USER", "root"),
        "GLOO_SOCKET_IFNAME": DEVICE,
        "NCCL_SOCKET_IFNAME": DEVICE,
        "FRONTIER_LLM_ARCHIVE": str(cluster.folder / "venv.tar"),
        "FRONTIER_LLM_NODE_LOCAL": str(cluster.local),
        "FRONTIER_LLM_RESTARTS": "0",
        **(variables or {}),
    }
    sbatch = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    match = _JOB_ID.search(sbatch.stdout)
    if match is None:
        raise LaunchError(f"sbatch rejected {SCRIPT}: {sbatch.stderr.strip()}")
    number = int(match[1])
    return Job(cluster, number, Path(output.replace("%j", str(number))), run_dir)


def pack_environment(folder: Path) -> None:
    """Write FOLDER/venv.tar, the archive that the job scripts unpack on each node.

    The archive of `make archive` contains all packages. Simulated nodes share this machine's disk,
    so this archive only refers to the packages of the present environment.
    """
    venv = folder / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    packages = next(venv.glob("lib/python3*/site-packages"))
    present = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "present.pth").write_text(present + "\n")
    tar = ["tar", "--create", f"--file={folder}/venv.tar", f"--directory={folder}", ".venv"]
    subprocess.run(tar, check=True)
