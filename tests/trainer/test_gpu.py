"""The program on a device: the same run directory, the same falling loss, in each precision."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT
from tests.trainer.test_run import SMALL, corpus, folder

__all__ = ["corpus", "folder"]  # fixtures


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_run_on_one_device(
    folder: Path, corpus: list[str], precision: str, recompute: str
) -> None:
    run_dir = folder / f"gpu_{precision}_{recompute}"
    command = [
        sys.executable, "train.py", *SMALL, *corpus, f"run.dir={run_dir}",
        "trainer.steps=12", "launch.ranks=1",
        "parallel.pipeline=1", f"precision={precision}", f"recompute={recompute}",
        "optimizer.warmup_steps=0", "telemetry.wandb=off", "model.dropout=0.1",
        "model.attention_dropout=0.1",
    ]  # fmt: skip
    ended = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if not line["skipped"]]
    assert losses[-1] < losses[0]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["device"] != "cpu"
    assert summary["ranks"][0]["peak_bytes"] > sum(summary["ranks"][0]["memory_bytes"].values())
