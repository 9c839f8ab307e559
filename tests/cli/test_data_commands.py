"""frontier-llm preprocess, inspect_data.py and evaluate.py from the command line's side."""

import io
import json
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from frontier_lab.commands import convert as convert_checkpoint
from frontier_lab.commands import evaluate, generate, inspect_data, preprocess
from frontier_lab.convert.ours import write_weights
from frontier_lab.single_process_model import read_config
from frontier_llm.cli.compose import compose
from frontier_llm.cli.options import run_command
from frontier_llm.config import decode
from frontier_llm.data.corpora import open_data
from frontier_llm.data.run_loader import make_windows
from frontier_llm.errors import CheckpointError, ConfigError, DataError
from frontier_llm.geometry.inventory import model_shapes
from frontier_llm.saving import run_directory
from tests.data.conftest import write_jsonl
from tests.values import tiny_values


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory of a model that says every token is as likely as another."""
    base = tmp_path_factory.mktemp("run")
    values = tiny_values(
        "data=text", f"data.path={write_jsonl(base / 'text.jsonl', 120)}",
        f"data.directory={base / 'corpora'}", "data.vocabulary=300", "model.vocabulary=300",
        "data.validation_percent=10.0",
    )  # fmt: skip
    config = decode(values)
    run_directory.write_config(base, run_directory.to_yaml(values))
    shapes = model_shapes(config.model, config.data.sequence_length)
    # as an older version saved it, without its tokenizer
    meta = {"corpus": open_data(config.data).manifest.digest}
    write_weights(base, [[(name, torch.zeros(shape)) for name, shape in shapes.items()]], meta)
    return base


def test_preprocess_prepares_for_any_model(tmp_path: Path):
    """Which one reads it, and whether its vocabulary is large enough, is not known yet."""
    text = write_jsonl(tmp_path / "text.jsonl", 90)
    where = [f"data.path={text}", f"data.directory={tmp_path / 'c'}", "data.vocabulary=50257"]
    for data in ("text", "text_spans"):
        assert preprocess.main([f"data={data}", *where, "data.validation_percent=10.0"]) == 0
    with pytest.raises(ConfigError, match=r"data\.path"):
        preprocess.main(["data=text"])


def test_preprocess_reports_what_it_made_and_finds_it_again(tmp_path: Path, capsys):
    text = write_jsonl(tmp_path / "text.jsonl", 90)
    with text.open("a") as stream:
        stream.write('{"text": ""}\n{"title": "no text"}\n')
    arguments = [
        "--workers", "2", "data=text", f"data.path={text}", f"data.directory={tmp_path / 'c'}",
        "data.vocabulary=300", "data.validation_percent=10.0",
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"text.jsonl:92: no text under the key 'text'"):
        preprocess.main(arguments)
    assert preprocess.main([*arguments, "data.broken=skip"]) == 0
    said = capsys.readouterr().out
    assert "1  document left out, empty" in said
    assert "1  document left out, not text" in said
    assert "text.jsonl:92: no text under the key" in said
    assert "tokens/s" in said
    (folder,) = (tmp_path / "c").glob("text-*")
    before = folder.stat().st_mtime_ns
    assert preprocess.main(["data.broken=skip", *arguments]) == 0, "overrides may come first"
    assert folder.stat().st_mtime_ns == before
    said = capsys.readouterr().out
    assert "already prepared" in said
    assert "tokens/s" not in said


def test_preprocess_names_what_it_does_not_read(tmp_path: Path, capsys):
    text = write_jsonl(tmp_path / "text.jsonl", 90)
    words = ["data=text", f"data.path={text}", f"data.directory={tmp_path}/c", "trainer.steps=3"]
    more = ["model.vocabulary=300", "data.vocabulary=${model.vocabulary}"]
    assert preprocess.main([*words, *more, "data.validation_percent=10.0"]) == 0
    assert "without effect" not in capsys.readouterr().err
    assert preprocess.main([*words, "data.vocabulary=300", "data.validation_percent=10.0"]) == 0
    assert "trainer.steps=3: without effect" in capsys.readouterr().err


def test_every_bar_of_preprocess_is_full_at_the_end(tmp_path: Path):
    """Some stages, such as training a tokenizer, only report that they begin."""
    text, file = write_jsonl(tmp_path / "text.jsonl", 90), io.StringIO()
    words = ["data=text", f"data.path={text}", f"data.directory={tmp_path / 'c'}"]
    config = decode(compose([*words, "data.vocabulary=300", "data.packing=best_fit"])).data
    preprocess.preprocess(config, 1, Console(file=file, force_terminal=True, width=120))
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", file.getvalue())
    shown = dict(re.findall(r"^(\S.*?) +[━╸╺ ]* +(\d+)%", plain.replace("\r", "\n"), re.MULTILINE))
    assert {"training a tokenizer of 300 tokens", "packing documents (train) into samples"} <= set(
        shown
    )
    assert set(shown.values()) == {"100"}, shown


def test_a_wrong_key_is_a_configuration_error():
    with pytest.raises(ConfigError, match=r"data.path"):
        preprocess.main(["data.pth=x"])
    with pytest.raises(ConfigError, match=r"set data.path=FILE"):
        preprocess.main(["data=text"])


def test_inspect_shows_the_text_and_where_it_is_from(run: Path, capsys):
    assert inspect_data.main([str(run), "3"]) == 0
    said = capsys.readouterr().out
    corpora = open_data(read_config(run).data)
    view = inspect_data.View(read_config(run), corpora, run, train=True)
    assert "sample 3" in said
    assert "text.jsonl, record" in said
    assert [str(line) for line in view.lines(3)][-1].replace("<end>", "").strip()[:10] in said
    assert inspect_data.main([str(run), "0", "--validation", "1"]) == 0
    assert "sample 1" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        inspect_data.main([str(run / "nowhere"), "3"])
    assert run_command(partial(inspect_data.main, [str(run), "--", "-1"])) == 2


def test_inspect_compares_all_bytes_of_a_corpus(run: Path, tmp_path: Path, capsys):
    assert inspect_data.main([str(run)]) == 0
    assert "documents for training" in capsys.readouterr().out
    assert inspect_data.main([str(run), "--verify"]) == 0
    assert "all files match their digests" in capsys.readouterr().out
    file = open_data(read_config(run).data).corpora[0].train.prefix.with_suffix(".bin")
    good = file.read_bytes()
    try:
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        assert run_command(partial(inspect_data.main, [str(run), "--verify"])) == 1
        assert f"{file} is damaged: its content has changed" in capsys.readouterr().err
    finally:
        file.write_bytes(good)


def test_evaluation_of_a_model_that_knows_nothing(run: Path, capsys):
    assert evaluate.main([str(run), "--json", str(run / "scores.json")]) == 0
    (score,) = json.loads((run / "scores.json").read_text())
    read = make_windows(read_config(run), open_data(read_config(run).data), train=False)
    assert f"a validation during training reads {read}, " in capsys.readouterr().err
    corpora = open_data(read_config(run).data)
    split = corpora.manifest.validation
    assert score["loss"] == pytest.approx(math.log(300), rel=1e-5)
    bits = math.log2(300) * (split.tokens - split.documents) / split.text_bytes
    assert score["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert score["samples"] == (split.tokens - 1) // 16
    assert evaluate.spread(10, 4) == [0, 2, 5, 7]
    assert evaluate.spread(3, 9) == [0, 1, 2]
    absent = [str(run), "--checkpoint", str(run / "nowhere")]
    with pytest.raises(SystemExit, match="2"):
        evaluate.main(absent)
    with pytest.raises(SystemExit):
        evaluate.main([str(run), "--samples", "-3"])


def test_prompts_stand_on_either_side_of_options(run: Path, capsys):
    assert generate.main([str(run), "def", "--tokens", "2", "class"]) == 0
    said = capsys.readouterr().out
    assert "def" in said
    assert "class" in said
    (step,) = (run / "checkpoints").glob("step_*")
    for name in (str(step), step.name):
        given = ["--checkpoint", name, "def", "class", "--tokens", "2"]
        assert generate.main([str(run), *given]) == 0
        assert capsys.readouterr().out == said
    with pytest.raises(CheckpointError, match="no checkpoint"):
        generate.main([str(run), "--checkpoint", "step_00000077"])
    with pytest.raises(SystemExit, match="2"):
        generate.main([str(run), "--checkpoint", str(run / "nowhere")])


@pytest.mark.parametrize("text", ["", "- 1", "a: {", "run: 3", "\0"])
@pytest.mark.parametrize(
    "tool",
    [
        lambda run: inspect_data.main([run, "3"]),
        lambda run: evaluate.main([run]),
        lambda run: generate.main([run]),
        lambda run: convert_checkpoint.main(["--to", "hf", run, f"{run}/out"]),
    ],
    ids=["inspect_data", "evaluate", "generate", "convert_checkpoint"],
)
def test_a_damaged_configuration_is_named(tmp_path: Path, tool, text, capsys):
    (tmp_path / "config.yaml").write_text(text)
    assert run_command(partial(tool, str(tmp_path))) == 2
    assert f"{tmp_path}/config.yaml is damaged" in capsys.readouterr().err
