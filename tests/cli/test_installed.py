"""The program without a checkout: the files as a wheel installs them, run from another folder."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.covering import exhaustive

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Copy the packages, and inside it the folders that pyproject.toml puts into the wheel."""
    site = tmp_path_factory.mktemp("site")
    ignored = shutil.ignore_patterns("__pycache__")
    for package in ("frontier_llm", "frontier_lab"):
        shutil.copytree(ROOT / package, site / package, ignore=ignored)
    sources = re.search(
        r"^\[tool\.hatch\.build\.targets\.wheel\.sources\]\n((?:\w+ = .+\n)+)",
        (ROOT / "pyproject.toml").read_text(), re.MULTILINE,
    )  # fmt: skip
    for folder, target in re.findall(r'^(\w+) = "(.+)"$', sources[1], re.MULTILINE):
        shutil.copytree(ROOT / folder, site / target)
    return site


@pytest.fixture
def run(installed, tmp_path):
    """Return a function that runs the program; it returns (exit code, stdout, stderr)."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}

    def program(*arguments):
        ended = subprocess.run(
            [sys.executable, "-m", "frontier_llm", *arguments], cwd=tmp_path, text=True,
            env={**environment, "PYTHONPATH": str(installed)}, capture_output=True,
        )  # fmt: skip
        return ended.returncode, ended.stdout, ended.stderr

    return program


def test_the_shipped_configurations_compose(run):
    code, out, err = run("train", "--cfg", "job", "experiment=frontier_22b")
    assert code == 0, err
    assert "name: gpt_22b" in out


def test_a_job_script_and_the_files_that_it_sources_are_found(run, installed):
    code, out, err = run("launch", "experiment=frontier_22b")
    assert code == 0, err
    command = shlex.split(out.partition("command")[2])
    (script,) = (Path(word) for word in command if word.endswith(".sbatch"))
    assert script.is_relative_to(installed)
    (exported,) = (word for word in command if word.startswith("--export="))
    folder = Path(exported.partition("FRONTIER_LLM_SCRIPTS=")[2])
    files, sourced = [script], set()
    while files:
        names = re.findall(r'^source "\$\{[^}]+\}/([^"]+)"', files.pop().read_text(), re.MULTILINE)
        files += [folder / name for name in names]
        sourced |= set(names)
    assert {"frontier_env.sh", "train_job.sh", "restarts.sh", "common_env.sh"} <= sourced


@pytest.mark.parametrize(
    ("option", "arguments"),
    [
        ("--save", ["plan", "--this", "--save", "mine", "experiment=frontier_22b"]),
        # it refuses as the other, after it has imported torch
        *exhaustive(("--write", ["calibrate", "--ranks", "1", "--write", "mine"])),
    ],
)
def test_nothing_is_written_into_the_installation(run, installed, option, arguments):
    before = sorted(installed.rglob("*.yaml"))
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"configuration error at {option}\n  got:")
    assert "frontier-llm --conf-dir DIR" in err
    assert sorted(installed.rglob("*.yaml")) == before


def test_a_plan_is_written_to_a_directory_of_the_user(run, tmp_path):
    (tmp_path / "conf").mkdir()
    code, _, err = run(
        "--conf-dir", "conf", "plan", "--this", "--save", "mine", "experiment=frontier_22b"
    )
    assert code == 0, err
    assert (tmp_path / "conf" / "experiment" / "mine.yaml").exists()


def test_the_source_of_the_kernels_is_installed(installed):
    assert (installed / "frontier_llm/collectives/blockwise.c").is_file()
    assert (installed / "frontier_llm/collectives/blocks.h").is_file()
