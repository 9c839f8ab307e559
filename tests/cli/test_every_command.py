"""Every command explains itself and refuses at once what it does not understand.

Commands run in this process: a new process that imports torch takes seconds.
"""

import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

from frontier_llm.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]
SHIMS = sorted((ROOT / "tools").glob("*.py"))
BENCHMARKS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("benchmarks", "docs/generate")
    for path in (ROOT / folder).rglob("*.py")
    if "run_command(main)" in path.read_text()
)
PASS_OPTIONS_ON = {"launch"}
"""Commands that hand unknown options to sbatch."""


@pytest.fixture(autouse=True)
def process_state():
    """Undo what a command changes in its process."""
    with mock.patch.object(sys, "argv", list(sys.argv)), mock.patch.dict(os.environ):
        yield


def run(arguments: list[str]) -> object:
    """Run a command; return its exit code."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


def run_module(name: str, *arguments: str) -> object:
    """Run a module as `python -m NAME`; return its exit code."""
    sys.argv[:] = [name, *arguments]
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_explains_itself(name, capsys):
    assert run([name, "--help"]) in (0, None)
    assert len(capsys.readouterr().out.splitlines()) > 1


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in PASS_OPTIONS_ON])
def test_an_unknown_option_is_refused(name, capsys):
    assert run([name, "--no-such-option"]) == 2
    said = capsys.readouterr().err
    assert said
    assert "Traceback" not in said


def test_the_program_lists_its_commands(capsys):
    assert run(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in COMMANDS)


def test_an_unknown_command_is_refused_with_the_nearest_name(capsys):
    assert run(["pln"]) == 2
    said = capsys.readouterr().err
    assert "got:    pln" in said
    assert "did you mean frontier-llm plan?" in said


def test_a_conf_dir_that_does_not_exist_is_refused(capsys):
    assert run(["--conf-dir", "/no/such/folder", "plan"]) == 2
    assert "configuration error at --conf-dir" in capsys.readouterr().err


@pytest.mark.parametrize("path", SHIMS, ids=lambda path: path.stem)
def test_a_file_of_tools_is_a_command_of_the_program(path, capsys):
    sys.argv[:] = [str(path), "--help"]
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code in (0, None)
    assert capsys.readouterr().out
    assert len(path.read_text().splitlines()) <= 15


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_explains_itself_and_refuses_an_unknown_option(name, capsys):
    assert run_module(name, "--help") in (0, None)
    assert len(capsys.readouterr().out.splitlines()) > 1
    assert run_module(name, "--no-such-option") == 2
    assert "Traceback" not in capsys.readouterr().err
