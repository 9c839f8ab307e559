"""What a run prints before there is a log: where it is, and what happens to its corpus."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from frontier_lab.tables import tracked
from frontier_llm.cli.console import LINE_SECONDS, DelayedProgress, wide_console
from frontier_llm.cli.main import main
from tests.forked_train import run
from tests.texts import prose

ROOT = Path(__file__).parents[2]
FIRST = """
import sys
from frontier_llm.cli import run_preparation, train
announce = run_preparation.announce_run
def stop(config, ranks):
    announce(config, ranks)
    print(sorted({"torch", "megatron"} & sys.modules.keys()), flush=True)
    sys.exit(0)
run_preparation.announce_run = stop
train.main(sys.argv[1:])
"""
"""A program that ends after the first line of a run."""


def _first_line(folder, *overrides):
    words = [sys.executable, "-c", FIRST, "data=text", f"data.path={folder}/text.txt"]
    words += [f"data.directory={folder}/prepared", f"run.dir={folder}/run", "launch.ranks=2"]
    ended = subprocess.run(
        [*words, "parallel.pipeline=1", "data.vocabulary=300", *overrides],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.mark.slow
def test_the_first_line_says_what_is_to_do_before_torch_is_imported(tmp_path):
    (tmp_path / "text.txt").write_text(prose(10))
    path = f"data.path={tmp_path}/text.txt"
    line, imported = _first_line(tmp_path)
    assert re.match(r"\d\d:\d\d:\d\d  start      2 ranks in ", line)
    assert f"in {tmp_path}/run; corpus text in {tmp_path}/prepared: " in line
    assert line.endswith("B of text to prepare")
    assert imported == "[]"
    words = ["preprocess", "data=text", path]
    words += [f"data.directory={tmp_path}/prepared", "data.vocabulary=300"]
    assert run(lambda: main(words)).code == 0
    line, imported = _first_line(tmp_path)
    assert line.endswith(f"corpus text in {tmp_path}/prepared: prepared")
    assert imported == "[]"


def _reported(console, stages, *, lines):
    now = [0.0]
    with DelayedProgress(console, lines=lines, clock=lambda: now[0]) as progress:
        for seconds, stage, share in stages:
            now[0] = seconds
            progress(stage, share)


def test_without_a_terminal_there_are_occasional_lines(capsys):
    seconds = [0.0, 0.1, LINE_SECONDS, 1.5 * LINE_SECONDS, 2.2 * LINE_SECONDS]
    stages = [("reading", 0.0), ("cutting", 0.1), ("cutting", 0.4), ("cutting", 0.5),
              ("cutting", 0.75)]  # fmt: skip
    stages = [(when, *stage) for when, stage in zip(seconds, stages, strict=True)]
    _reported(Console(file=io.StringIO()), stages, lines=True)
    printed = [line[10:] for line in capsys.readouterr().out.splitlines()]
    assert printed == [
        "corpus     reading",
        "corpus     cutting",
        "corpus     cutting 50%",
    ]
    _reported(Console(file=io.StringIO()), stages, lines=False)
    assert capsys.readouterr().out == ""


def test_items_are_counted_in_lines_of_their_command(capsys):
    assert list(tracked([5, 6], "evaluate", "book.txt")) == [5, 6]
    (line,) = capsys.readouterr().out.splitlines()
    assert line[10:] == "evaluate   book.txt"


def test_on_a_terminal_there_is_a_bar_at_once(capsys):
    file = io.StringIO()
    _reported(
        Console(file=file, force_terminal=True, width=80), [(0.0, "reading", 0.2)], lines=True
    )
    assert "reading" in file.getvalue()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("columns", "width"), [("77", 77), ("wide", 200), (None, 200)])
def test_a_pipe_has_the_width_of_columns_or_is_wide(monkeypatch, columns, width):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert wide_console().width == width
