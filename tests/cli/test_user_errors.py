"""A user's mistake has one form and one exit code in every command, and leaves nothing on disk."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from frontier_llm.cli.main import COMMANDS
from frontier_llm.cli.options import run_command
from frontier_llm.errors import ConfigError
from frontier_llm.saving import run_directory
from tests.cli.test_every_command import process_state, run
from tests.covering import covering

__all__ = ["process_state"]
OF_KEYS = ("train", "plan", "goodput", "doctor", "preprocess", "sweep", "explain-layout")
OF_RUNS = ("report", "generate", "evaluate", "inspect", "inspect-data", "convert", "sweep-report")
AFTER_RUN = {"inspect-data": ["0"], "convert": ["out", "--to", "hf"]}
BAD_KEYS = {
    "trainer.step=10": "trainer.steps",
    "trainer.steps=abc": "trainer.steps=100",
    "model.activation=relu": "model.activation=gelu",
    "sharding=fsdp": "sharding=zero3",
    "run.dir=''": "run.dir=",
    "data.path=book.txt": "or write data=text",
}
BAD_RUNS = {"nosuch": "correct", "file": "correct", "runs": "runs/a", "runz": "did you mean runs"}
BAD_RUNS["run.dir=runs/a"] = "write runs/a"
OTHERS = [
    ["train", "data=text", "data.path=nosuch.txt"],
    ["train", "data.tokenizer=nosuch"],
    ["train", "run.init_from=nosuch"],
    ["train", "experiment=frontier_22b"],
    ["train", "launch.ranks=3"],
    ["preprocess", "data=text", "data.path=nosuch.txt"],
    ["launch", "trainer.step=3"],
    ["launch", "cluster=polaris_a100_40g", "data.path=book.txt"],
    ["dry-run", "frontier_23b"],
    ["plan", "--table", "nosuch.csv"],
    ["plan", "--json=nosuch/file.json", "--html=nosuch/file.html"],
    ["plan", "--json=nosuch/file.json"],
    ["plan", "--save=" + 300 * "x"],
    ["goodput", "--chart=/proc/file.svg"],
    ["explain-layout", "--svg=/proc/file.svg"],
    ["report", "/proc"],
    ["evaluate", "runs/a", "--json=" + 300 * "x"],
    ["evaluate", "runs/a", "--text", 300 * "x"],
    ["evaluate", "runs/a", "--samples=0"],
    ["evaluate", "runs/a", "--text", "nosuch"],
    ["generate", "runs/a", "--tokens", "x"],
    ["convert", "runs/a", "out"],
    ["inspect", "runs/a"],
    ["inspect", "runs/a", "--diff", "nosuch"],
    ["calibrate", "--ranks=0"],
    ["goodput", "--nodes=x"],
    ["funnel"],
    ["--conf-dir", "nosuch", "plan"],
]
NAMED = [
    ["--json", "plan", "--json=/proc/file.json"],
    ["--json", "evaluate", "runs/a", "--json=/proc/file.json"],
    ["--folder", "funnel", "--folder=/proc/x", "--stage", "trainer.steps=1", "1"],
    ["--samples", "evaluate", "runs/a", "--samples=2", "--text", "file"],
    ["--text", "evaluate", "runs/a", "--harness=x", "--text", "file"],
    ["--stride", "evaluate", "runs/a", "--stride=2"],
    ["--harness-tasks", "evaluate", "runs/a", "--harness-tasks=runs"],
    ["--temperature", "generate", "runs/a", "--temperature=-1"],
    ["--temperature", "generate", "runs/a", "--temperature=nan"],
    ["--seed", "generate", "runs/a", "--seed=999999999999999999999999999"],
    ["--dtype", "convert", "runs", "out", "--from=hf", "--dtype=bf16"],
    ["--family", "convert", "runs", "out", "--from=hf", "--family=t5"],
    ["--each", "inspect", "checkpoints", "--each"],
    ["--dtype", "inspect", "checkpoints", "--dtype=bf16"],
    ["--validation", "inspect-data", "runs/a", "--validation"],
    ["--export", "inspect", "checkpoints", "--export", "nosuch/file"],
    ["--fit", "plan", "--fit"],
    ["--json", "plan", "--table=file", "--json=x"],
    ["--this", "plan", "--table=file", "--this"],
    ["launch.nodes", "train", "launch.nodes=2"],
    ["planner.nodes", "train", "planner.nodes=2"],
    ["launch.nodes", "doctor", "launch.nodes=2"],
    ["launch.ranks", "launch", "experiment=frontier_22b", "launch.ranks=24"],
    ["launch.ranks", "launch", "cluster=frontier_mi250x", "launch.ranks=3"],
    ["trainer.seed", "train", "trainer.seed=18446744073709551616"],
    ["planner.nodes", "plan", "planner.nodes=[]"],
    ["run.allow_changes", "train", "run.allow_changes=trainer.steps"],
]
"""Mistakes, each after the key or the option that the message names."""
CASES = [
    *([command, key, part] for command in OF_KEYS for key, part in BAD_KEYS.items()),
    *([command, path, part] for command in OF_RUNS for path, part in BAD_RUNS.items()),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with a file and a folder of two runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text")
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text("run: {dir: x}\n")
    return tmp_path


def _check(arguments: list[str], folder: Path, capfd: pytest.CaptureFixture[str]) -> str:
    before = sorted(folder.rglob("*"))
    assert run(arguments) == 2
    said = capfd.readouterr().err
    first, *parts = [line for line in said.splitlines() if line]
    assert first.startswith("configuration error at "), said
    assert [line[:10].strip() for line in parts] == ["got:", "wants:", "do:"], said
    assert sorted(folder.rglob("*")) == before
    return said


@pytest.mark.parametrize(
    ("command", "word", "part"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_mistake_in_an_argument(
    command: str, word: str, part: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if command == "sweep-report" and word == "runs":
        part = "sweep-report --help"
    said = _check([command, word, *AFTER_RUN.get(command, [])], folder, capfd)
    assert part in said.splitlines()[-1]


@pytest.mark.parametrize("arguments", OTHERS, ids=" ".join)
def test_another_mistake(
    arguments: list[str], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _check(arguments, folder, capfd)


@pytest.mark.parametrize(("key", "arguments"), [(key, rest) for key, *rest in NAMED], ids=str)
def test_an_option_that_cannot_be_obeyed(
    key: str, arguments: list[str], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = _check(arguments, folder, capfd)
    assert said.startswith(f"configuration error at {key}\n")
    assert "[]" not in said.splitlines()[-1]


def test_some_of_many_runs_are_named_with_the_number_of_others(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for number in range(6):
        (folder / "runs" / f"c{number}").mkdir()
        (folder / "runs" / f"c{number}" / "config.yaml").touch()
    said = _check(["generate", "runs"], folder, capfd)
    assert "a folder of 8 runs" in said
    assert "runs/c1 or " in said
    assert said.rstrip().endswith("runs/c5, or one of 3 earlier runs")


def test_a_run_replaces_no_file_and_says_that_others_are_there(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_directory.lock_run_dir(folder, "auto", has_checkpoint=False, lock=False)
    assert "checkpoints and 2 more: a run adds its own" in capfd.readouterr().err
    (folder / "summary.json").write_text("mine")
    with pytest.raises(ConfigError, match=r"which a run replaces: summary\.json"):
        run_directory.lock_run_dir(folder, "auto", has_checkpoint=False, lock=False)
    (folder / "config.yaml.sha256").touch()  # a run has written the files
    run_directory.lock_run_dir(folder, "auto", has_checkpoint=False, lock=False)
    assert capfd.readouterr().err == ""


def test_every_command_is_tried() -> None:
    assert set(COMMANDS) == {*OF_KEYS, *OF_RUNS, *(words[0] for words in OTHERS)} - {"--conf-dir"}


@pytest.mark.parametrize(
    "arguments",
    covering([["train", "--help"], ["--help"], ["train", "--cfg", "job"]], [["train", "--help"]]),
)
def test_a_closed_pipe_is_no_error(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "frontier_llm", *arguments]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize("code", [130, 143])
def test_an_interruption_that_a_library_hides_ends_the_command(
    code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def hidden(error: Exception) -> NoReturn:
        try:
            raise KeyboardInterrupt(code - 128)
        finally:
            raise error

    def refuse() -> NoReturn:
        try:
            hidden(ValueError("half built"))
        except ValueError:
            raise ConfigError("model", "nothing", "a file", "choose one") from None

    assert run_command(lambda: hidden(TypeError("half built"))) == code
    assert run_command(refuse) == code
    assert capsys.readouterr().err == "interrupted\n" * 2


def test_a_home_is_expanded_and_no_folder_has_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from frontier_llm.cli.compose import compose
    from frontier_llm.config import decode

    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("SCRATCH", "/scratch")
    config = decode(
        compose(
            [
                'run.dir="~/x"', "data=blend", "data.directory='$SCRATCH/corpora'",
                'data.corpora=[{name: a, path: "~/a"}]', 'data.tokenizer="~"',
                "checkpoint.tiers.local.path='~/$NODE'",
            ]
        )
    )  # fmt: skip
    assert config.run.dir == f"{folder}/x"
    assert config.data.directory == "/scratch/corpora"
    assert config.data.corpora[0].path == f"{folder}/a"
    assert config.data.tokenizer == str(folder)
    assert config.checkpoint.tiers.local.path == f"{folder}/$NODE"
