"""Every tool says what it does, and refuses at once what it does not understand.

Run in this process: to start one anew, with torch, takes seconds.
"""

import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
NAMES = sorted(
    path.stem for path in TOOLS.glob("*.py") if 'if __name__ == "__main__"' in path.read_text()
)
HAND_OPTIONS_ON = {"launch"}
"""To sbatch, which knows them."""


def run(name: str, *arguments: str) -> object:
    """Run a tool; return its exit code."""
    path = str(TOOLS / f"{name}.py")
    with (
        mock.patch.object(sys, "argv", [path, *arguments]),
        mock.patch.object(sys, "path", list(sys.path)),
        mock.patch.dict(os.environ),
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_path(path, run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize("name", NAMES)
def test_help_is_there(name, capsys):
    assert run(name, "--help") in (0, None)
    assert len(capsys.readouterr().out.splitlines()) > 1


@pytest.mark.parametrize("name", [name for name in NAMES if name not in HAND_OPTIONS_ON])
def test_an_unknown_option_is_refused(name, capsys):
    assert run(name, "--no-such-option") == 2
    said = capsys.readouterr().err
    assert said
    assert "Traceback" not in said
