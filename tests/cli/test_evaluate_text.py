"""The perplexity of texts: windows, their sum, and what is refused."""

import json
import math
import os
import re
import shutil
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from frontier_lab.commands import evaluate, evaluate_text, generate, inspect_data
from frontier_lab.commands.evaluate_text import evaluate_texts, windows_of
from frontier_lab.single_process_model import (
    read_config,
    single_process_model,
    single_process_run,
)
from frontier_llm.cli import console
from frontier_llm.cli.options import run_command
from frontier_llm.config import RunConfig
from frontier_llm.data.batch import Batch
from frontier_llm.data.corpora import open_data
from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.data.tokenizer_source import open_tokenizer
from frontier_llm.errors import ConfigError, DataError
from frontier_llm.trainer.pipeline import Pipeline
from tests.data.test_corpus_check import flip
from tests.forked_train import TINY, train
from tests.texts import prose

WINDOW = 32
TEXT = "def main(arguments):\n    return sum(int(word) for word in arguments)\n" * 6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "text.txt").write_text(prose(20))
    ended = train(
        *TINY, f"run.dir={folder}/run", f"data.path={folder}/text.txt", "trainer.steps=3",
        f"data.directory={folder}/prepared", f"data.sequence_length={WINDOW}",
    )  # fmt: skip
    assert ended.code == 0, ended.text
    (folder / "text.py").write_text(TEXT)
    lines = (json.dumps({"text": text}) for text in (TEXT, "import os", ""))
    (folder / "two.jsonl").write_text("\n".join(lines))
    return folder / "run"


@pytest.mark.parametrize("stride", [1, 5, 8])
@pytest.mark.parametrize("count", [1, 2, 8, 9, 10, 30])
def test_each_token_is_predicted_once_from_the_tokens_before_it(count: int, stride: int) -> None:
    tokens, predicted = list(range(count)), []
    for window in windows_of(tokens, 8, stride):
        assert [token + 1 for token in window.inputs] == list(window.labels)
        assert len(window.inputs) <= 8
        last = list(window.labels)[-window.predicted :]
        predicted += last
        context = last[0] - window.inputs[0]  # number of tokens before the first predicted one
        assert window.inputs[0] == 0 or context > 8 - stride
    assert predicted == tokens[1:]


def by_hand(config: RunConfig, tokenizer: Tokenizer, pipeline: Pipeline, stride: int) -> float:
    """Predict each token alone, from the window in which it is predicted."""
    ids = [tokenizer.eod, *tokenizer.encode(TEXT)]
    total = 0.0
    for window in windows_of(ids, WINDOW, stride):
        for place in range(len(window.inputs) - window.predicted, len(window.inputs)):
            tokens = torch.tensor([window.inputs[: place + 1]])
            padded = torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % 16))
            batch = Batch(padded, padded, torch.arange(padded.shape[1])[None])
            with torch.no_grad():
                logits = pipeline.logits(batch, place)
            assert logits is not None
            logits = logits[0, : config.model.vocabulary].double()
            total -= float(logits.log_softmax(0)[window.labels[place]])
    return total


@pytest.mark.parametrize("stride", [WINDOW, 7])
def test_the_sum_is_that_of_all_tokens_one_by_one(run: Path, stride: int) -> None:
    config, _ = single_process_run(run, None)
    tokenizer = open_data(config.data).tokenizer
    with single_process_model(config, run, torch.device("cpu")) as (model, groups):
        (score,) = evaluate_texts(
            config, tokenizer, model, groups, [run.parent / "text.py"], stride
        )
        expected = by_hand(config, tokenizer, Pipeline(model, groups), stride)
    assert score.nats == pytest.approx(expected, rel=1e-6)
    assert score.tokens == len(tokenizer.encode(TEXT)) > 2 * WINDOW
    assert score.bytes == len(TEXT)


def test_weights_are_evaluated_as_the_model_that_they_were_saved_with(
    run: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    file = other / "config.yaml"
    text = file.read_text()
    changed = re.sub(r"(?m)^  norm_epsilon: .*$", "  norm_epsilon: 0.5", text)
    assert changed != text
    file.write_text(changed)  # as a run does that resumes with run.allow_changes
    scores = []
    for folder in (run, other):
        out = tmp_path / f"{folder.name}.json"
        words = ["--checkpoint", str(folder / "checkpoints"), "--text", str(run.parent / "text.py")]
        assert evaluate.main([str(folder), *words, "--json", str(out)]) == 0
        scores.append(json.loads(out.read_text())[0]["nats_per_token"])
    assert scores[0] == scores[1]


def test_the_command_prints_and_writes_the_scores(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "WIDTH", 80)
    monkeypatch.setattr(console, "LINE_SECONDS", math.inf)
    files, scores = [str(run.parent / name) for name in ("text.py", "two.jsonl")], run / "s.json"
    one_by_one = ["--text", files[0], "--text", files[1]]
    assert evaluate.main([str(run), *one_by_one, "--stride", "8", "--json", str(scores)]) == 0
    one, two = json.loads(scores.read_text())
    assert (one["documents"], two["documents"]) == (1, 2)
    assert two["bytes"] == len(TEXT) + len("import os")
    nats = one["nats_per_token"] * one["tokens"]
    assert one["bits_per_byte"] == pytest.approx(nats / len(TEXT) / math.log(2))
    assert one["word_perplexity"] == pytest.approx(math.exp(nats / one["words"]))
    said = capsys.readouterr().out
    started = re.findall(r"^[\d:]{8}  evaluate   (.*)$", said, re.MULTILINE)
    assert started == ["text.py", "two.jsonl"]
    table = said[said.index("two.jsonl\n") :]
    assert "…" not in table
    assert table.split().count("perplexity") == 2
    folded = "".join(line.partition(" ")[2].split(" ")[0] for line in table.splitlines())
    assert all(file in folded for file in files), "names are whole"


def test_the_training_and_the_command_give_one_figure_for_the_same_samples(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training has read only the first samples; the command reads all, and names both."""
    assert evaluate.main([str(run), "--json", str(run / "all.json")]) == 0
    note = capsys.readouterr().err
    (read,) = re.findall(r"validation during training reads (\d+) of \d+ samples", note)
    ((loss, bits),) = re.findall(r"loss is ([\d.]+) nats per token = ([\d.]+) bits per byte", note)
    *_, last = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert float(loss) == pytest.approx(last["validation_loss"], abs=2e-4)
    assert float(bits) == pytest.approx(last["validation_bits_per_byte"], abs=2e-4)
    (score,) = json.loads((run / "all.json").read_text())
    assert score["samples"] > int(read) > 0
    assert abs(score["loss"] - float(loss)) > 1e-3, "the other samples have another loss"


@pytest.mark.parametrize("command", [evaluate, generate])
def test_changed_bytes_of_the_validation_split_are_refused(
    command: ModuleType, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = Path(read_config(run).data.directory).glob("*/validation.bin")
    before = file.read_bytes()
    flip(file, len(before) // 2)
    try:
        assert run_command(lambda: command.main([str(run)])) != 0
    finally:
        file.write_bytes(before)
    said = " ".join(capsys.readouterr().err.split())
    assert f"{file} is damaged: its content has changed since it was prepared, in bytes 0" in said


def test_bits_per_byte_are_marked_where_the_tokenizer_drops_characters(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["abc def abc"] * 90), model_prefix=str(tmp_path / "m"),
        vocab_size=290, minloglevel=2, hard_vocab_limit=False, byte_fallback=True,
    )  # fmt: skip
    files = [tmp_path / "lines.txt", tmp_path / "line.txt"]
    for file, text in zip(files, ("abc\n\ndef\n" * 20, "abc def " * 20), strict=True):
        file.write_text(text)
    config, tokenizer = single_process_run(run, None)[0], open_tokenizer(tmp_path / "m.model")
    with single_process_model(config, run, torch.device("cpu")) as built:
        scores = evaluate_texts(config, tokenizer, *built, files)
    assert [bool(score.bits_note) for score in scores] == [True, False]
    evaluate_text.show(scores[:1])
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"over all tokens \(too low: the tokenizer drops or replaces 33\.3% ", said)
    evaluate_text.show(scores)
    said = " ".join(capsys.readouterr().out.split())
    assert f"{files[0].name} (too low" in said
    assert f"{files[1].name} (too low" not in said
    evaluate_text.show(scores[1:])
    assert "too low" not in capsys.readouterr().out


@pytest.mark.parametrize("command", [evaluate, generate, inspect_data])
def test_a_checkpoint_in_the_place_of_a_run_is_told_apart(
    command: ModuleType, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = run / "checkpoints" / "step_00000003"
    with pytest.raises(SystemExit, match="2"):
        command.main([str(checkpoint)])
    run_name, named = os.path.relpath(run), f"add --checkpoint {checkpoint}"
    said = capsys.readouterr().err
    assert f"do:     name {run_name}" in said
    # an option that the command has
    assert (f"; to choose weights, {named}" in said) == (command is not inspect_data)
    with pytest.raises(SystemExit, match="2"):
        command.main([str(run / "failures")])
    said = capsys.readouterr().err
    assert "--checkpoint" not in said


def test_mistakes_are_refused_with_a_reason(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "binary.txt").write_bytes(b"a\0b")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "no.json").write_text('[{"body": "b"}]')
    (tmp_path / "no.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    text = str(run.parent / "text.py")
    for arguments, message, exit_code in [
        ([str(tmp_path / "binary.txt")], "null byte", ConfigError.exit_code),
        ([str(tmp_path / "empty.txt")], "empty.txt: it is empty", ConfigError.exit_code),
        ([str(tmp_path / "no.json")], "JSON without the key 'text'", ConfigError.exit_code),
        ([str(tmp_path / "no.jsonl")], "no.jsonl, place 2: no text", ConfigError.exit_code),
        ([text, "--stride", str(WINDOW + 1)], f"1 to {WINDOW}", ConfigError.exit_code),
    ]:
        command = partial(evaluate.main, [str(run), "--text", *arguments])
        assert run_command(command) == exit_code
        said = capsys.readouterr().err
        assert message in said
        assert "  do: " in said
    for name, message in (("absent.txt", "a file that exists"), ("", "a folder")):
        with pytest.raises(SystemExit, match="2"):
            evaluate.main([str(run), "--text", str(tmp_path / name)])
        said = capsys.readouterr().err
        assert "at --text" in said
        assert message in said


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-evaluation-harness is installed")
def test_without_the_harness_the_error_says_what_to_install(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = partial(evaluate.main, [str(run), "--harness", "hellaswag"])
    assert run_command(command) == ConfigError.exit_code
    said = capsys.readouterr().err
    assert "lm_eval" in said
    assert "pip install lm-eval accelerate" in said


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-evaluation-harness")
def test_the_harness_finds_the_same_bits_per_byte(run: Path, tmp_path: Path) -> None:
    task = {
        "task": "local_text", "dataset_path": "json", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(run.parent / "two.jsonl")}},
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte"}],
    }  # fmt: skip
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task))
    text, tasks = str(tmp_path / "text.json"), str(tmp_path / "tasks.json")
    options = ["--harness", "local_text", "--harness-tasks", str(tmp_path), "--json", tasks]
    assert evaluate.main([str(run), *options]) == 0
    assert evaluate.main([str(run), "--text", str(run.parent / "two.jsonl"), "--json", text]) == 0
    found = json.loads(Path(tasks).read_text())["local_text"]["bits_per_byte,none"]
    assert found == pytest.approx(json.loads(Path(text).read_text())[0]["bits_per_byte"], rel=1e-5)


def test_the_key_of_the_texts_may_differ_from_that_of_the_run(run: Path, tmp_path: Path) -> None:
    table, scores = tmp_path / "a.csv", tmp_path / "s.json"
    table.write_text("name,body\nx,import os\ny,import re\n")
    with pytest.raises(DataError, match="give as --text-key the column"):
        evaluate.main([str(run), "--text", str(table)])
    arguments = [str(run), "--text", str(table), "--text-key", "body", "--json", str(scores)]
    assert evaluate.main(arguments) == 0
    (score,) = json.loads(scores.read_text())
    assert (score["documents"], score["bytes"]) == (2, len("import osimport re"))


def test_a_text_and_the_validation_split_have_the_same_bits_per_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the windows are the same: documents that fit into a sample, each by itself."""
    texts = [f"line {n * n} of {'x' * (n % 5)}" for n in range(120)]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    ended = train(
        *TINY, f"run.dir={tmp_path}/run", f"data.path={tmp_path}/text.jsonl", "trainer.steps=2",
        f"data.directory={tmp_path}/prepared", "data.sequence_length=64", "data.vocabulary=270",
        "data.documents=separate", "data.packing=best_fit", "trainer.evaluate_batches=50",
    )  # fmt: skip
    assert ended.code == 0, ended.text
    run, split, text = tmp_path / "run", str(tmp_path / "s.json"), str(tmp_path / "t.json")
    corpora = open_data(read_config(run).data)
    stream = corpora.corpora[0].validation
    starts = [*stream.document_starts().tolist(), len(stream)]
    kept = [
        corpora.tokenizer.decode(stream.read(start, end - start - 1).tolist())
        for start, end in pairwise(starts)
    ]
    assert set(kept) < set(texts)
    (tmp_path / "kept.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in kept))
    assert evaluate.main([str(run), "--json", split]) == 0
    said = capsys.readouterr().err
    assert f"step 2 in fp32 on the validation split of {tmp_path}/text.jsonl\n" in said
    assert evaluate.main([str(run), "--text", f"{tmp_path}/kept.jsonl", "--json", text]) == 0
    of_split, of_text = (json.loads(Path(f).read_text())[0] for f in (split, text))
    assert of_split["bits_per_byte"] == pytest.approx(of_text["bits_per_byte"], rel=1e-5)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["validation_bits_per_byte"] == pytest.approx(of_text["bits_per_byte"], rel=1e-4)
    assert last["validation_loss"] == pytest.approx(of_split["loss"], rel=1e-4)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["validation_samples"] == of_split["samples"]
    assert "bits per byte of text, over all tokens" in ended.text
