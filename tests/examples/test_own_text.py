"""The commands of docs/own-text.md run in the order of the page, with a tiny model."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.texts import prose

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "own-text.md"
TINY = {
    "model.layers": 2, "model.hidden": 32, "model.heads": 2, "model.vocabulary": 400,
    "data.vocabulary": 300, "data.sequence_length": 32, "data.global_batch": 4,
    "data.micro_batch": 1, "launch.ranks": 2, "trainer.evaluate_every_steps": "null",
    "trainer.evaluate_batches": 1, "trainer.sample_tokens": 0, "precision": "fp32",
    "telemetry.wandb": "off", "trainer.steps": 2, "data.directory": "corpora",
}  # fmt: skip
"""Settings of the test. They replace those that a command gives, except `KEPT`."""
KEPT = ("launch.ranks", "trainer.steps")


def commands() -> list[list[str]]:
    """Return the words of every command of the page."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", "").splitlines()
    return [shlex.split(line) for line in lines if not line.startswith("#")]


def smaller(words: list[str]) -> list[str]:
    """Return a command with the settings of the test if it trains."""
    if words[0] != "frontier-llm":
        return words
    given = {word.partition("=")[0] for word in words}
    tiny = {key: value for key, value in TINY.items() if key not in given or key not in KEPT}
    if "data.tokenizer" in given:  # it has its own tokens
        del tiny["data.vocabulary"]
    kept = [word for word in words[1:] if word.partition("=")[0] not in tiny]
    settings = [f"{key}={value}" for key, value in tiny.items()] if words[1] == "train" else []
    return [sys.executable, "-m", "frontier_llm", *kept, *settings]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the page names."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    (tmp_path / "book.txt").write_text(prose(30))
    (tmp_path / "other.txt").write_text(prose(5, 30))
    byte_level = tokenizers.ByteLevelBPETokenizer()
    byte_level.train([str(tmp_path / "book.txt")], vocab_size=350, special_tokens=["</s>"])
    (tmp_path / "my_tokenizer").mkdir()
    byte_level.save(str(tmp_path / "my_tokenizer" / "tokenizer.json"))
    return tmp_path


def environment() -> dict[str, str]:
    """Return the environment of a user outside of Slurm."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return {**environ, "PYTHONPATH": str(ROOT)}


def run(words: list[str], folder: Path) -> str:
    """Run a command and return its output."""
    done = subprocess.run(
        smaller(words), cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


def stop_during_training(train: list[str], stop: list[str], folder: Path) -> int:
    """Start a run, stop it when it has done a step, and return its exit code."""
    with subprocess.Popen(
        smaller(train), cwd=folder, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if "step 1/" in line:
                subprocess.run(stop, cwd=folder, check=True)
        return process.wait()


def steps_done(folder: Path) -> list[int]:
    """Return the numbers of the steps in the run's metrics."""
    lines = (folder / "runs/mine/metrics.jsonl").read_text().splitlines()
    return [step for line in lines if (step := json.loads(line).get("step"))]


@pytest.mark.exhaustive
def test_the_lines_of_the_page_run_in_their_order(folder: Path):
    train, stop, resume, inspect, evaluate, of_text, generate, export, *others = commands()
    assert stop_during_training(train, stop, folder) == 3
    stopped = len(steps_done(folder))
    run(resume, folder)
    assert stopped < 300
    assert steps_done(folder) == list(range(1, 301)), "no step is lost or done twice"
    assert "300" in run(inspect, folder)
    assert "bits" in run(evaluate, folder)
    assert "other.txt" in run(of_text, folder)
    assert run(generate, folder).startswith("The ")
    run(export, folder)
    assert (folder / "my_model" / "model.safetensors").is_file()
    for other in others:
        assert "step 2/2" in run(other, folder)
    assert len(others) == 2


def test_every_command_of_the_page_is_one_that_the_test_runs():
    found = commands()
    assert [words[0] for words in found].count("touch") == 1
    assert {words[1] for words in found if words[0] == "frontier-llm"} == {
        "train", "inspect", "evaluate", "generate", "convert",
    }  # fmt: skip
