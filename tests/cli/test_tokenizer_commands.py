"""A run with a tokenizer.json: training, generation, evaluation, export and import."""

import json
import math
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from frontier_lab.commands import convert, evaluate, generate, inspect_data
from frontier_lab.single_process_model import read_config
from frontier_llm.cli.compose import compose
from frontier_llm.cli.options import run_command
from frontier_llm.config import decode
from frontier_llm.data.corpora import open_data
from frontier_llm.data.tokenizer_source import digest_tokenizer, open_tokenizer
from frontier_llm.saving import run_directory
from tests.data.tokenizer_families import train_family
from tests.forked_train import train
from tests.texts import documents

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

# transformers loads weights in threads that it keeps
pytestmark = [pytest.mark.forked, pytest.mark.slow]

VOCABULARY = 301
"""An odd number, which two tensor-parallel ranks divide only with padding."""


@pytest.fixture(
    scope="module",
    params=[
        "llama3",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("gpt2", "qwen2")),
    ],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory of a tensor-parallel training with a tokenizer of a family."""
    base = tmp_path_factory.mktemp("run")
    texts = documents(30)
    (base / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (base / "tokenizer").mkdir()
    train_family(request.param, texts, VOCABULARY, base / "tokenizer")
    size = open_tokenizer(base / "tokenizer").vocabulary
    assert size % 2
    ended = train(
        "model=gpt_tiny", f"model.vocabulary={size}", "model.layers=2",
        "model.hidden=32", "model.heads=2", "data=text", f"data.path={base}/text.jsonl",
        f"data.directory={base}/corpora", f"data.tokenizer={base}/tokenizer",
        "data.validation_percent=30", "data.sequence_length=32", "data.global_batch=4",
        "data.micro_batch=1", "launch.ranks=2", "parallel.pipeline=1", "parallel.tensor=2",
        "trainer.evaluate_every_steps=null", "trainer.sample_tokens=0", "precision=fp32",
        "telemetry.wandb=off", "trainer.steps=2", f"run.dir={base}/run",
    )  # fmt: skip
    assert ended.code == 0, ended.text
    return base / "run"


def test_generation_and_inspection_use_the_tokenizer(run: Path, capsys):
    assert generate.main([str(run), "--tokens", "5", "import os"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("import os")
    tokenizer = open_data(read_config(run).data).tokenizer
    end = tokenizer.token_of(tokenizer.eod)
    assert said.err == f"before each prompt: {end} (the end of a document)\n"
    assert inspect_data.main([str(run), "0"]) == 0
    assert "text.jsonl" in capsys.readouterr().out


def test_commands_look_once_for_the_newest_checkpoint(run: Path, tmp_path: Path, caplog):
    """A run may save a newer one meanwhile; a damaged newest one is reported once."""
    shutil.copytree(run, tmp_path / "run")
    damaged = tmp_path / "run/checkpoints/step_00000003"
    shutil.copytree(tmp_path / "run/checkpoints/step_00000002", damaged)
    os.truncate(damaged / "manifest.json", 100)
    named = str(tmp_path / "run")
    for command in (
        partial(generate.main, [named, "--tokens", "2", "import"]),
        partial(evaluate.main, [named, "--samples", "1"]),
        partial(convert.main, ["--to", "hf", named, str(tmp_path / "out")]),
    ):
        caplog.clear()
        assert command() == 0
        assert [record.message.count("step_00000003") for record in caplog.records] == [1]


def test_generation_says_which_mode_it_puts_before_a_prompt():
    data = decode(compose(["model=mt5_tiny", "data=text_ul2", "data.path=x"])).data
    unused: Any = None
    said = generate.words_before(data, unused)
    assert said == "mode S2S; before one with gaps (<extra_id_0>): mode NLU"
    assert "S2S" in str(generate.__doc__)


def test_bits_per_byte_count_the_bytes_of_the_text(run: Path):
    file = run.parent / "scores.json"
    assert evaluate.main([str(run), "--json", str(file), "--samples", "4"]) == 0
    (score,) = json.loads(file.read_text())
    split = open_data(read_config(run).data).manifest.validation
    # the ends of documents, which are no text, change the mean loss of an untrained model little
    bits = score["loss"] * (split.tokens - split.documents) / split.text_bytes / math.log(2)
    assert score["bits_per_byte"] == pytest.approx(bits, rel=0.01)


def test_the_tokenizer_is_exported_checked_and_imported(run: Path, tmp_path: Path, capsys):
    original, out, back = run.parent / "tokenizer", tmp_path / "out", tmp_path / "back"
    assert main(["--to", "hf", str(run), str(out)]) == 0, capsys.readouterr().err
    ours, theirs = open_tokenizer(original), transformers.AutoTokenizer.from_pretrained(out)
    text = "def main():\n    return 'naïve' + \"雪\"  # 12345\n"
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert theirs.encode(text) == [ours.eod, *ours.encode(text)]
    assert theirs.eos_token_id == ours.eod
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == ours.eod
    assert main(["--from", "hf", str(out), str(back), "--no-check"]) == 0
    assert digest_tokenizer(back) == digest_tokenizer(out)
    config = run_directory.from_yaml((back / "config.yaml").read_text())
    assert config["data"]["tokenizer"] == str(back / "tokenizer.json")


def test_a_tokenizer_that_changed_since_the_training_is_not_exported(
    run: Path, tmp_path: Path, capsys
):
    """The one in the folder of the prepared corpus is exported; without it, none."""
    original, corpora, out = run.parent / "tokenizer", run.parent / "corpora", tmp_path / "out"
    trained_with = digest_tokenizer(original)
    (original / "special_tokens_map.json").write_text("{}")
    try:
        assert digest_tokenizer(original) != trained_with
        assert main(["--to", "hf", str(run), str(out), "--no-check"]) == 0
        assert not (out / "special_tokens_map.json").exists()
        capsys.readouterr()
        corpora.rename(run.parent / "moved")
        assert main(["--to", "hf", str(run), str(tmp_path / "other"), "--no-check"]) == 2
    finally:
        (original / "special_tokens_map.json").unlink()
        if (run.parent / "moved").exists():
            (run.parent / "moved").rename(corpora)
    assert f"the tokenizer of the checkpoint (digest {trained_with[:12]}" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def main(arguments: list[str]) -> int:
    """Convert; return the exit code of the process."""
    return run_command(partial(convert.main, arguments))
