"""Run a program of the repository in the environment of a user."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.patience import patient

ROOT = Path(__file__).parents[1]


def output_of(command: Sequence[str | Path], **environ: str) -> str:
    """Run a command outside of any job of Slurm; return what it prints."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(
        command, cwd=ROOT, env=own | environ, capture_output=True, text=True,
        timeout=patient(60), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
