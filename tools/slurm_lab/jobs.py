"""Jobs of this repository's own scripts on a lab cluster, and what became of them."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from frontier_llm.errors import LaunchError
from frontier_llm.telemetry.history import History
from tools.slurm_lab.cluster import SlurmCluster
from tools.slurm_lab.nodes import DEVICE

ROOT = Path(__file__).resolve().parents[2]
_JOB_ID = re.compile(r"Submitted batch job (\d+)")
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


@dataclass(frozen=True)
class Job:
    """One job of Slurm."""

    cluster: SlurmCluster
    number: int
    log: Path
    """What it says."""
    run_dir: Path

    @property
    def fields(self) -> dict[str, str]:
        """What scontrol knows of it: JobState, Restarts, ExitCode and the like."""
        words = self.cluster.ask("scontrol", "--oneliner", "show", "job", str(self.number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    @property
    def ended(self) -> bool:
        """Whether Slurm is done with it."""
        return self.fields["JobState"] in _ENDED

    @property
    def exit_code(self) -> int:
        """Of the script."""
        return int(self.fields["ExitCode"].split(":")[0])

    @property
    def said(self) -> str:
        """Everything that it has said so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each step in its run directory."""
        return losses_of(self.run_dir)

    @property
    def steps(self) -> int:
        """The last step in its run directory."""
        return max(self.losses, default=0)

    def ranks(self) -> dict[int, int]:
        """Return the process of each rank that runs."""
        found = {
            int(environ.get("SLURM_PROCID", -1)): pid
            for pid, words, environ in self._processes()
            if "train.py" in words and "srun" not in words[0]
        }
        return {rank: pid for rank, pid in sorted(found.items()) if rank >= 0}

    def _processes(self) -> Iterator[tuple[int, list[str], dict[str, str]]]:
        """Yield (process, command line, environment) of all that Slurm started for it."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                text = (process / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            environ = dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
            ours = environ.get("SLURM_CONF") == self.cluster.environ["SLURM_CONF"]
            if ours and environ.get("SLURM_JOB_ID") == str(self.number):
                yield int(process.name), words, environ

    def wait(self, what: Callable[[], bool], seconds: float, words: str) -> float:
        """Wait until `what` holds; return how long that took.

        Raises:
            LaunchError: it does not hold in that time; shows what the job said last.
        """
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            if what():
                return time.monotonic() - start
            time.sleep(0.2)
        raise LaunchError(
            f"job {self.number}: not {words} within {seconds:.0f} s "
            f"({self.fields['JobState']}); it said last:\n{self.said[-3000:]}"
        )


def losses_of(run_dir: Path) -> dict[int, float]:
    """Return the loss of each step that a run directory has so far."""
    return dict(History.read(run_dir).points("loss"))


def submit(
    cluster: SlurmCluster,
    script: str,
    options: Sequence[str],
    overrides: Sequence[str],
    run_dir: Path,
) -> Job:
    """Hand a script to Slurm as a user does.

    Args:
        cluster: where it runs.
        script: of the repository, unmodified.
        options: of sbatch.
        overrides: of train.py.
        run_dir: of the run; the log lies beside it.
    """
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    output = f"{run_dir.parent}/{run_dir.name}-%j.out"
    command = ["sbatch", f"--output={output}", *options, script, *overrides, f"run.dir={run_dir}"]
    environ = {
        **os.environ,
        **cluster.environ,
        "USER": os.environ.get("USER", "root"),
        "GLOO_SOCKET_IFNAME": DEVICE,
        "NCCL_SOCKET_IFNAME": DEVICE,
        "FRONTIER_LLM_ARCHIVE": str(cluster.folder / "venv.tar"),
        "FRONTIER_LLM_NODE_LOCAL": str(cluster.local),
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    match = _JOB_ID.search(done.stdout)
    if match is None:
        raise LaunchError(f"sbatch refused {script}: {done.stderr.strip()}")
    number = int(match[1])
    return Job(cluster, number, Path(output.replace("%j", str(number))), run_dir)


def pack_environment(folder: Path) -> None:
    """Make a small archive of a virtual environment that sees this one's packages.

    What `make archive` makes holds the packages themselves; the nodes of a lab share this disk.
    """
    venv = folder / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    packages = next(venv.glob("lib/python3*/site-packages"))
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "here.pth").write_text(here + "\n")
    tar = ["tar", "--create", f"--file={folder}/venv.tar", f"--directory={folder}", ".venv"]
    subprocess.run(tar, check=True)
