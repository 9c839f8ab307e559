"""The command that looks into checkpoints: its answers, and its exit codes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.checkpoint.manager import CheckpointManager, Options
from tests.checkpoint.crew import PATIENCE, run_crew
from tests.checkpoint.states import States
from tools.inspect_checkpoint import main


def save(rank: int, size: int, store: Any, folder: Path, cut: tuple[int, int], step: int) -> None:
    states = States(*cut, rank)
    states.advance(step)
    if step == 6:  # one element of one tensor
        states.advance(5)
        states.shards[0].exp_avg[3] += 0.5
    options = Options(chunk_bytes=4096)
    manager = CheckpointManager(folder, rank, size, store, "blocking", 1, PATIENCE, options)
    manager.begin(step, states.shards, {"samples": 480})


def make(folder: Path, cut: tuple[int, int], step: int = 5) -> Path:
    outcomes = run_crew(save, cut[0] * cut[1], folder, cut, step)
    assert not [outcome.error for outcome in outcomes if outcome.error]
    return folder


def test_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "checkpoints", (2, 3))
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "step 5, " in text.replace("\n", " ")
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.split()}
    assert lines["layers.*.ffn.up.weight"] == ["2", "48", "x", "24", "2", "3", "13.50", "KiB"]
    assert lines["final_norm.weight"] == ["1", "24", "1", "3", "288", "B"]
    assert lines["samples:"] == ["480"]


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, (1, 2))
    folder = tmp_path / "step_00000005"
    assert main([str(folder), "--verify"]) == 0
    assert "every byte is what was written" in capsys.readouterr().out
    file = folder / "rank_00001.safetensors"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    content[9000] ^= 1
    file.write_bytes(content)
    assert main([str(folder), "--verify"]) == 1
    text = capsys.readouterr().out.replace("\n", "")
    assert f"{file} is damaged: bytes 0 to 4096" in text
    assert f"{file} is damaged: bytes 8192 to 12288" in text
    assert "2 chunks damaged" in text


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = make(tmp_path / "one", (2, 2)), make(tmp_path / "other", (1, 3))
    assert main([str(one), "--diff", str(other)]) == 0
    assert "equal: all 6 tensors" in capsys.readouterr().out
    make(tmp_path / "changed", (1, 1), step=6)
    assert main([str(one), "--diff", str(tmp_path / "changed")]) == 1
    text = capsys.readouterr().out
    assert "exp_avg" in text
    assert "1 of 2424" in text
    assert "0.5" in text
    assert "exp_avg_sq" not in text


def test_run_as_a_file_on_nothing(tmp_path: Path) -> None:
    tool = Path(__file__).parents[2] / "tools" / "inspect_checkpoint.py"
    done = subprocess.run(
        [sys.executable, str(tool), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path} is no checkpoint: it has no manifest.json\n"
