"""A separate virtual environment for DeepSpeed, which is not a dependency of this project."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from frontier_llm.errors import LaunchError

FOLDER = Path(__file__).resolve().parents[2] / ".venv-deepspeed"
DEEPSPEED = "deepspeed==0.19.8"


def ensure(console: Console) -> Path:
    """Return the interpreter of an environment with DeepSpeed; make the environment if needed.

    The environment has the same version of torch as this one. Its file `ready` names the packages,
    and is written last.

    Raises:
        LaunchError: the environment cannot be made; the message contains that of pip.
    """
    python, ready = FOLDER / "bin" / "python", FOLDER / "ready"
    torch = f"torch=={importlib.metadata.version('torch').partition('+')[0]}"
    wanted = f"{torch} {DEEPSPEED}"
    if ready.exists() and ready.read_text() == wanted:
        return python
    console.print(f"making {FOLDER.name} with {wanted}")
    _do([sys.executable, "-m", "venv", "--clear", str(FOLDER)])
    (FOLDER / ".gitignore").write_text("*\n")
    # torch first, because DeepSpeed uses the installed version
    for package in (torch, DEEPSPEED):
        _do([str(python), "-m", "pip", "install", "--quiet", package])
    ready.write_text(wanted)
    return python


def _do(command: list[str]) -> None:
    """Run a command.

    Raises:
        LaunchError: the command failed.
    """
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise LaunchError(
            f"{' '.join(command)!r} failed; omit --deepspeed, or fix this:\n"
            + "\n".join(done.stderr.splitlines()[-10:])
        )
