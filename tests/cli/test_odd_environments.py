"""Commands whose standard streams, working folder, terminal or locale is unusual."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from frontier_llm.errors import ConfigError
from tests.covering import covering

TWO_RANKS = """
import sys
from frontier_llm.launch.forked_ranks import ForkedRanks
ranks = ForkedRanks()
ranks.fork(0, lambda: len(print("a line") or "abc"))
ranks.wait(30)
print(ranks.ended[0][0], file=sys.stderr)
"""
OPENED = """
import os, sys
from frontier_llm.cli.main import main
main(["--version"])
sys.exit(os.open(os.devnull, os.O_RDONLY))
"""
LOGGED = """
from frontier_llm.cli.main import main
from frontier_llm.telemetry.log import setup_logging
main(["--version"])
setup_logging(0).info("naïve words")
"""


def run_in_shell(line: str, *python: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Run Python in a shell's line, which has its arguments as "$@"; its output is buffered."""
    return subprocess.run(
        ["sh", "-c", line, "sh", sys.executable, *python],
        env=os.environ | {"PYTHONPATH": str(Path.cwd()), "PYTHONUNBUFFERED": ""} | environ,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_closed_streams_read_and_write_nothing() -> None:
    ended = run_in_shell('exec "$@" <&- >&-', "-m", "frontier_llm", "--version")
    assert (ended.returncode, ended.stderr) == (0, "")
    # a file that is opened now does not get the number of a standard stream
    ended = run_in_shell('exec "$@" <&- >&-', "-c", OPENED)
    assert ended.returncode > 2


@pytest.mark.parametrize("unbuffered", covering(["", "1"], ["1"]))
@pytest.mark.parametrize("arguments", [["--help"], ["train", "--cfg", "job"]])
def test_output_to_a_full_disk_is_an_error(arguments: list[str], unbuffered: str) -> None:
    python = ("-m", "frontier_llm", *arguments)
    ended = run_in_shell('exec "$@" >/dev/full', *python, PYTHONUNBUFFERED=unbuffered)
    assert ended.returncode == 1
    assert ended.stderr == "the output cannot be written: No space left on device\n"


def test_a_rank_whose_log_is_full_keeps_its_exit_code() -> None:
    ended = run_in_shell('exec "$@" >/dev/full', "-c", TWO_RANKS)
    assert ended.stderr.splitlines()[0] == "3"
    code = "from frontier_llm.launch.failure import exit_without_handlers as end; print(1); end(3)"
    assert run_in_shell('exec "$@" >/dev/full', "-c", code).returncode == 3


def test_a_working_folder_that_was_removed_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    line = f'cd {tmp_path}/gone && rmdir {tmp_path}/gone && exec "$@"'
    ended = run_in_shell(line, "-m", "frontier_llm", "train", "plan=dry_run")
    assert ended.returncode == ConfigError.exit_code
    assert ended.stderr.startswith("configuration error at the working folder\n")


def test_a_path_that_is_no_text_is_refused() -> None:
    line = 'exec "$@" "$(printf "run.dir=a\\351")"'
    ended = run_in_shell(line, "-m", "frontier_llm", "train", "plan=dry_run")
    assert ended.returncode == ConfigError.exit_code
    assert (
        "at run.dir\n  got:    'a\\udce9' (text)\n  wants:  text: not empty, in UTF-8"
        in ended.stderr
    )


def test_output_appears_without_unicode_and_without_columns() -> None:
    ended = run_in_shell('exec "$@"', "-c", LOGGED, PYTHONIOENCODING="ascii", COLUMNS="0")
    assert ended.returncode == 0, ended.stderr
    assert "na\\xefve words" in ended.stdout
