"""CI fails because of a test that fails and then passes, and names it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
from pathlib import Path

def test_good():
    pass

def test_unsteady():
    if not Path("tried").exists():
        Path("tried").touch()
        assert False

def test_bad():
    assert False
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Make a repository whose `make test` runs the tests above."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "tests", tmp_path / ".ci" / "tests")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_all.py").write_text(TESTS)
    (tmp_path / "Makefile").write_text("test:\n\t.venv/bin/python -m pytest -k '$(KEYWORD)'\n")
    return tmp_path


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
@pytest.mark.parametrize(
    ("keyword", "code", "named"),
    [
        ("", 1, ["UNSTABLE test_all.py::test_unsteady", "FAILED test_all.py::test_bad"]),
        ("unsteady", 1, ["UNSTABLE test_all.py::test_unsteady"]),
        ("good", 0, []),
    ],
)
def test_what_passes_when_it_runs_again_is_an_error(
    clone: Path, keyword: str, code: int, named: list[str]
) -> None:
    done = subprocess.run(
        [".ci/tests", "test"], cwd=clone, capture_output=True, text=True, check=False,
        env={"PATH": os.environ["PATH"], "KEYWORD": keyword},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    last = done.stdout.splitlines()[-len(named) :] if named else []
    assert last == named
    assert ("UNSTABLE" in done.stdout) == ("UNSTABLE" in str(named))
