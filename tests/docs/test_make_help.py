"""What `make help` prints."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_help_lists_targets_and_none_of_the_other_comments():
    command = ["make", "--no-print-directory", "help"]  # tests may run below another make
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert lines[0].startswith("make train ")
    named = re.findall(r"^make ([a-z-]+) ", done.stdout, re.MULTILINE)
    assert set(named) <= set(targets)
    header = (ROOT / "Makefile").read_text().partition("\n\n")[0]
    assert len(lines) == len(header.splitlines())


def test_settings_of_a_run_are_passed_on():
    """Make takes `key=value` as variables, also if the key has a dot."""
    words = ["run.dir=runs/a", "trainer.steps=5", "data=text"]
    command = ["make", "--no-print-directory", "--dry-run", "train", "ARGS=plan=off", *words]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment
    )
    program, name, *passed = done.stdout.splitlines()[-1].split()
    assert (Path(program).name, name) == ("frontier-llm", "train")
    assert sorted(passed) == sorted(["plan=off", *words])
