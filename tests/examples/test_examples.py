"""The examples run: their scripts with tiny models and few steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, output_of
from tests.texts import prose

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
TINY = (
    "model.layers=2", "model.hidden=32", "model.heads=2", "model.vocabulary=300",
    "data.vocabulary=300", "data.sequence_length=32", "data.global_batch=4", "data.micro_batch=1",
    "launch.ranks=2", "trainer.evaluate_every_steps=null", "trainer.sample_tokens=0",
    "precision=fp32", "telemetry.wandb=off", "trainer.steps=2", "trainer.evaluate_batches=1",
)  # fmt: skip


@pytest.fixture
def text(tmp_path):
    """A text file of a size that a tokenizer with 300 entries can learn from."""
    file = tmp_path / "text.txt"
    file.write_text(prose(30))
    return file


def run(*command, folder, path=None):
    """Run an example in the environment of a user; return its output."""
    environ = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "RUN": str(folder / "run")}
    return output_of(command, **environ, PATH=path or os.environ["PATH"])


def find(program):
    """Return the path of a program."""
    folders = [Path(folder) for folder in os.environ["PATH"].split(":")]
    return next(folder / program for folder in folders if (folder / program).exists())


@pytest.mark.exhaustive
def test_laptop_text_trains_and_generates(tmp_path, text):
    data = f"data.directory={tmp_path}/corpora"
    output = run(EXAMPLES / "laptop_text" / "run.sh", text, *TINY, data, folder=tmp_path)
    assert (tmp_path / "run" / "checkpoints" / "step_00000002").is_dir()
    assert "step 2/2" in output
    assert "\nThe " in output, "the continued prompt"
    more = ("trainer.steps=3", "run.allow_changes=[trainer.steps]", "launch.ranks=2")
    output = run(EXAMPLES / "laptop_text" / "run.sh", text, *TINY, data, *more, folder=tmp_path)
    assert "step 3/3" in output


@pytest.mark.exhaustive
def test_an_encoder_decoder_begins_with_a_decoder(tmp_path, text):
    words = [w for w in TINY if not w.startswith(("model.layers", "model.vocab", "trainer.steps"))]
    words += ["model.vocabulary=500", "model.head_dim=16", f"data.directory={tmp_path}/corpora"]
    words += ["trainer.steps=40", "optimizer.warmup_steps=5"]
    output = run(EXAMPLES / "encoder_decoder" / "run.sh", text, *words, folder=tmp_path)
    assert "nats per token" in output, "the evaluation"
    assert "\nThe " in output, "the continued prompt"
    runs = [tmp_path / "run" / name / "summary.json" for name in ("decoder", "adapted")]
    decoder, adapted = (json.loads(file.read_text()) for file in runs)
    assert adapted["initial_validation_loss"] < decoder["initial_validation_loss"] - 0.2


@pytest.mark.exhaustive
def test_a_trained_model_is_loaded_with_transformers(tmp_path, text):
    """The training runs on this machine: `sbatch` is hidden."""
    pytest.importorskip("transformers")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "env", "realpath"):
        (tools / name).symlink_to(find(name))
    data = ("data=text", f"data.path={text}", f"data.directory={tmp_path}/corpora")
    script, out = EXAMPLES / "slurm_to_hugging_face" / "run.sh", tmp_path / "hugging_face"
    output = run(script, out, *TINY, *data, folder=tmp_path, path=str(tools))
    assert (out / "model.safetensors").is_file()
    assert f"{out}: 36,096 parameters" in output


def test_with_slurm_the_job_is_submitted_and_waited_for(tmp_path):
    """A script in the place of `sbatch` records its arguments and fails."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/arguments\nexit 1\n')
    sbatch.chmod(0o755)
    environ = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    environ |= {"PATH": f"{sbatch.parent}:{os.environ['PATH']}", "RUN": str(tmp_path / "run")}
    environ |= {"SBATCH_OPTIONS": "-A project --time=01:00:00"}
    script = EXAMPLES / "slurm_to_hugging_face" / "run.sh"
    command = [script, tmp_path / "out", "experiment=megatron_1_7b"]
    done = subprocess.run(command, cwd=ROOT, env=environ, check=False, capture_output=True)
    assert done.returncode != 0
    arguments = (tmp_path / "arguments").read_text().split()
    assert {"--nodes=4", "--wait", "-A", "project", "--time=01:00:00"} <= set(arguments)
    assert f"run.dir={tmp_path}/run" in arguments


@pytest.mark.exhaustive
def test_a_llama_trains_in_its_own_loop_and_continues_on_two_ranks(tmp_path):
    pytest.importorskip("transformers")
    script, folder = EXAMPLES / "own_loop" / "own_loop.py", tmp_path / "loop"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    first = run(*torchrun, "4", script, "--steps", "10", "--folder", folder, folder=tmp_path)
    assert first.splitlines()[0].startswith("step 1 ")
    again = run(*torchrun, "2", script, "--steps", "11", "--folder", folder, folder=tmp_path)
    assert [line.split()[1] for line in again.splitlines()] == ["11"]
    alone = run(*torchrun, "1", script, "--steps", "12", "--folder", folder, folder=tmp_path)
    assert [line.split()[1] for line in alone.splitlines()] == ["11", "12"], "from step 10"
    assert len(script.read_text().splitlines()) <= 62
