"""Run turns of DeepSpeed, which has a virtual environment of its own with torch and deepspeed."""

import importlib.metadata
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import ROOT
from benchmarks.peers.turn import RankFigures, Turn
from frontier_llm.errors import LaunchError

FOLDER = ROOT / ".venv-deepspeed"
PACKAGE = "deepspeed==0.19.8"


def run_deepspeed(turn: Turn) -> list[RankFigures]:
    """Take a turn in a process of the environment; return the measurements of its ranks.

    Raises:
        LaunchError: the environment cannot be made, or the turn failed.
    """
    python = environment()
    with tempfile.TemporaryDirectory(prefix="bench_deepspeed_") as folder:
        file = Path(folder, "turn")
        file.write_bytes(pickle.dumps(turn))
        # torch must start with one thread, because thread pools do not survive a fork
        _do([str(python), "-m", "benchmarks.peers.deepspeed_peer", str(file)])
        found: list[RankFigures] = pickle.loads(file.read_bytes())
        return found


def environment() -> Path:
    """Return the interpreter of an environment with DeepSpeed; make the environment if needed.

    The environment has the same version of torch as this one. Its file `ready` names the packages,
    and is written last.

    Raises:
        LaunchError: the environment cannot be made; the message contains that of pip.
    """
    python, ready = FOLDER / "bin" / "python", FOLDER / "ready"
    torch = f"torch=={importlib.metadata.version('torch').partition('+')[0]}"
    wanted = f"{torch} {PACKAGE}"
    if ready.exists() and ready.read_text() == wanted:
        return python
    print(f"making {FOLDER.name} with {wanted}", file=sys.stderr)
    _do([sys.executable, "-m", "venv", "--clear", str(FOLDER)])
    (FOLDER / ".gitignore").write_text("*\n")
    # torch first, because DeepSpeed uses the installed version
    for package in (torch, PACKAGE):
        _do([str(python), "-m", "pip", "install", "--quiet", package])
    ready.write_text(wanted)
    return python


def _do(command: list[str]) -> None:
    variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True,
        env={**os.environ, **variables},
    )  # fmt: skip
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-15:])
        raise LaunchError(f"{' '.join(command)!r} failed; omit --deepspeed, or fix this:\n{tail}")
