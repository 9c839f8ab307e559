"""Evaluate weights on the validation split: `frontier-llm evaluate RUN_DIR [--checkpoint PATH]`.

Prints the loss of each corpus in nats per token and, for a GPT, in bits per byte of text over all
tokens, which allows comparisons between tokenizers. For a blend of several corpora it also prints
the means, weighted as in training. Reads every sample of the validation split once, or
`--samples N` of them, evenly spread. Runs in one process in fp32, on a GPU if there is one. The
parallel layout of the run does not matter.

With `--text FILE ...` it measures the perplexity of other texts instead. Each file is one document,
or one document per line or row in JSONL, CSV and Parquet (`--text-key`). A text is read in windows
of `data.sequence_length` tokens. With `--stride N` consecutive windows overlap, so that each token
after the first window is predicted from at least data.sequence_length - N tokens before it.

With `--harness TASKS` it converts the weights to the format of Hugging Face and runs tasks of
lm-evaluation-harness, which must be installed, for example `--harness hellaswag,arc_easy`.
"""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))

import torch

from frontier_lab.commands import convert, evaluate_text
from frontier_lab.commands.evaluate_text import evaluate_texts
from frontier_lab.option_values import (
    file,
    new_file,
    refuse_useless,
    saved_in_run,
    trained_run,
    write_json,
)
from frontier_lab.single_process_model import (
    no_model,
    single_process_model,
    single_process_run,
)
from frontier_lab.tables import tracked
from frontier_lab.trained_tokenizer import open_trained_tokenizer, prepare_again
from frontier_llm.checkpoint.discovery import find
from frontier_llm.cli.console import DelayedProgress, plain_table, wide_console
from frontier_llm.cli.options import at_least, folder, tool_parser
from frontier_llm.config import RunConfig
from frontier_llm.data.batch import LossSums
from frontier_llm.data.corpora import Corpora, ValidationWindows, open_all
from frontier_llm.data.run_loader import make_batch_maker, make_windows, window_corpus
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.errors import ConfigError
from frontier_llm.model.build import Model
from frontier_llm.parallel.groups import Groups
from frontier_llm.telemetry.metrics import BITS_PER_BYTE
from frontier_llm.trainer.evaluate import Validation, summarize
from frontier_llm.trainer.pipeline import Pipeline

HARNESS_PACKAGES = ("lm_eval", "accelerate")
"""Packages that lm-evaluation-harness needs for a model of transformers."""

NEEDS = {"--stride": "--text", "--text-key": "--text", "--harness-tasks": "--harness"}
EXCLUDES = {"--samples": ("--text", "--harness"), "--text": ("--harness",)}
"""Options that have no effect without, or with, others."""


@dataclass(frozen=True)
class Score:
    """The loss on one corpus."""

    corpus: str
    weight: float
    """The corpus's share of the samples of the run."""
    samples: int
    loss: float
    """Mean loss (`data.loss_mean`), in nats per token."""
    bits_per_byte: float | None
    """None for span corruption, which does not predict every token."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate and print the scores; return the exit code."""
    parser = tool_parser(__doc__)
    parser.add_argument("run", type=trained_run, metavar="RUN_DIR", help="the run directory")
    parser.add_argument("--checkpoint", type=saved_in_run, help="a checkpoint (default: newest)")
    parser.add_argument("--samples", type=at_least(1), help="samples per corpus (default: all)")
    parser.add_argument(
        "--text", type=file, nargs="+", action="extend", metavar="FILE", help="evaluate these files"
    )
    parser.add_argument(
        "--text-key", metavar="KEY", help="key or column of the texts (default: that of the run)"
    )
    parser.add_argument("--harness", metavar="TASKS", help="tasks, separated by commas")
    parser.add_argument(
        "--harness-tasks", type=folder, metavar="DIR", help="a folder with further tasks in YAML"
    )
    parser.add_argument(
        "--stride",
        type=at_least(1),
        help="tokens between two windows of a text (default: the length of a window)",
    )
    parser.add_argument("--json", type=new_file, help="also write the figures to this file")
    options = refuse_useless(parser, parser.parse_args(arguments), NEEDS, EXCLUDES)
    config, weights = single_process_run(options.run, options.checkpoint)
    device = Accelerator.of_rank(0).device
    if options.harness:
        found = run_harness(options, weights, device, config.data.micro_batch)
        if options.json:
            write_json(options.json, found, "--json")
        return 0
    corpora = None if options.text else _open_corpora(config, weights)
    with single_process_model(config, weights, device) as built:
        if corpora is None:
            stride, tokenizer = options.stride, open_trained_tokenizer(config, weights)
            key = options.text_key or config.data.text_key
            texts = evaluate_texts(config, tokenizer, *built, options.text, stride, key)
            _check_losses(weights, {text.file: text.nats for text in texts})
            evaluate_text.show(texts)
            rows = [evaluate_text.to_dict(text) for text in texts]
        else:
            mean, scores, in_training = evaluate(config, corpora, *built, options.samples)
            _check_losses(weights, {score.corpus: score.loss for score in scores})
            show(mean, scores, corpora.bits_note)
            print(in_training, file=sys.stderr)
            rows = [asdict(score) for score in scores]
    if options.json:
        write_json(options.json, rows, "--json")
    return 0


def _check_losses(weights: Path, losses: Mapping[str, float]) -> None:
    for name, loss in losses.items():
        if not math.isfinite(loss):
            raise no_model(weights, f"the loss on {name} is {loss:.4g}")


def _open_corpora(config: RunConfig, weights: Path) -> Corpora:
    """Say what is evaluated, and prepare and open the corpora."""
    checkpoint = find(weights)
    if "converted_from" in checkpoint.manifest.meta:
        raise ConfigError(
            "--text",
            f"no files, for a model imported from {checkpoint.manifest.meta['converted_from']}",
            "texts to evaluate: the validation split of the model is not known",
            "add --text FILE ..., or train the model and evaluate that run: frontier-llm train "
            "run.init_from=RUN_DIR ... data=text data.path=FILE",
        )
    names = ", ".join(corpus.path or corpus.name for corpus in config.data.sources)
    print(f"step {checkpoint.step} in fp32 on the validation split of {names}", file=sys.stderr)
    with DelayedProgress(wide_console(stderr=True)) as progress:
        otherwise = ", or evaluate other texts: add --text FILE ..."
        corpora = open_all(config.data, prepare_again(config, otherwise, progress))
    corpora.check_validation()
    meta, manifest = checkpoint.manifest.meta, corpora.manifest
    if meta.get("tokenizer") not in (None, manifest.tokenizer_sha256):
        raise ConfigError(
            "data.path",
            f"{names}, whose tokenizer is not that of step {checkpoint.step}",
            "the text that the run has read: the tokenizer was trained on it",
            "restore the text, or evaluate other texts: add --text FILE ...",
        )
    if meta.get("corpus") not in (None, manifest.digest):
        print("warning: the text has changed since, so that training may have read this split",
              file=sys.stderr)  # fmt: skip
    return corpora


def evaluate(
    config: RunConfig, corpora: Corpora, model: Model, groups: Groups, samples: int | None
) -> tuple[Validation, list[Score], str]:
    """Evaluate `samples` (None: all) of every corpus; return the result on all, and on each.

    The text says which samples a validation of the training reads, and the result on them.

    Raises:
        DataError: a validation split is shorter than one sample.
    """
    pipeline = Pipeline(model, groups)
    make_batch, end = make_batch_maker(config, corpora), corpora.tokenizer.eod
    trained = make_windows(config, corpora, train=False)
    assert isinstance(trained, ValidationWindows)
    by_corpus, by_corpus_in_training = [], []
    for number, (name, corpus) in enumerate(zip(corpora.names, corpora.corpora, strict=True)):
        windows = window_corpus(config, corpus, train=False)
        indices = spread(len(windows), samples or len(windows))
        size = config.data.micro_batch
        by_batch = [indices[first : first + size] for first in range(0, len(indices), size)]
        first = sum(trained.corpus(place) == number for place in range(len(trained)))
        sums = torch.zeros(2, len(LossSums._fields), dtype=torch.float64, device=pipeline.device)
        with pipeline.evaluating():
            for batch in tracked(by_batch, "evaluate", name):
                read = make_batch([windows[index] for index in batch], batch)
                of_samples = pipeline.sums([read.to(pipeline.device)], end)[0]
                sums[0] += of_samples.sum(0)
                sums[1] += of_samples[: sum(index < first for index in batch)].sum(0)
        all_sums, first_sums = sums.tolist()
        by_corpus.append(LossSums(*all_sums))
        by_corpus_in_training.append(LossSums(*first_sums))
    mean, each = summarize(config, corpora, by_corpus)
    scores = [
        Score(name, corpora.weights[name], found.samples, found.loss, found.bits_per_byte)
        for name, found in zip(corpora.names, each, strict=True)
    ]
    note = f"a validation during training reads {trained}, in the precision of the run"
    if samples is None and len(trained) < mean.samples:
        part, _ = summarize(config, corpora, by_corpus_in_training)
        bits = "" if part.bits_per_byte is None else f" = {part.bits_per_byte:.4f} bits per byte"
        note += f"; on these samples the loss is {part.loss:.4f} nats per token{bits}"
    return mean, scores, note


def spread(count: int, wanted: int) -> list[int]:
    """Return `wanted` evenly spread integers below `count`; all of them if there are fewer."""
    wanted = min(wanted, count)
    return [number * count // wanted for number in range(wanted)]


def show(mean: Validation, scores: Sequence[Score], note: str = "") -> None:
    """Print the table of scores, with a note on bits per byte."""
    has_bits = any(score.bits_per_byte is not None for score in scores)
    numbers = ("weight", "samples", "nats per token", "bits per byte")
    table = plain_table("", ("corpus", *numbers), right=numbers)
    table.caption = f"{BITS_PER_BYTE}{note}" if has_bits else None
    rows = list(scores)
    if len(scores) > 1:
        rows.append(Score("weighted mean", 1.0, mean.samples, mean.loss, mean.bits_per_byte))
    for score in rows:
        bits = "-" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"
        table.add_row(
            score.corpus, f"{score.weight:.3f}", str(score.samples), f"{score.loss:.4f}", bits
        )
    wide_console().print(table)


def run_harness(
    options: argparse.Namespace, weights: Path, device: torch.device, samples: int
) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness in fp32, and print its table; return the results by task.

    The harness evaluates a model of transformers, so the weights are converted to a temporary
    folder. In names of tasks, `*` stands for any characters. A batch has `samples`.
    """
    absent = [package for package in HARNESS_PACKAGES if find_spec(package) is None]
    if absent:
        got = f"tasks, but {' and '.join(absent)} cannot be imported"
        wants = "lm-evaluation-harness"
        install = f"{sys.executable} -m pip install lm-eval accelerate"
        todo = f"{install}; --text measures perplexities without it"
        raise ConfigError("--harness", got, wants, todo)
    more = options.harness_tasks
    harness, utils = import_module("lm_eval"), import_module("lm_eval.utils")
    manager = import_module("lm_eval.tasks").TaskManager(include_path=more and str(more))
    known: list[str] = []
    for task in options.harness.split(","):
        matching = manager.match_tasks([task])
        if not matching:
            wants = "the name of a task of lm-evaluation-harness"
            todo = "lm_eval ls tasks lists them; --harness-tasks FOLDER adds your own"
            raise ConfigError("--harness", task, wants, todo)
        known += matching
    with tempfile.TemporaryDirectory(prefix="frontier_llm_harness_") as name:
        model = Path(name) / "model"
        words = ["--to", "hf", "--no-check", "--checkpoint", str(weights)]
        convert.main([*words, str(options.run), str(model)])
        results = harness.simple_evaluate(
            model="hf",
            model_args=f"pretrained={model},dtype=float32",
            tasks=known,
            task_manager=manager,
            batch_size=samples,
            device=str(device),
        )
    print(utils.make_table(results))
    if results.get("groups"):
        print(utils.make_table(results, "groups"))
    found: dict[str, Any] = results["results"]
    return found
