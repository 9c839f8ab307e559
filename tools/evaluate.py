"""Evaluate weights on the validation text: `python tools/evaluate.py RUN_DIR [--checkpoint PATH]`.

Prints the loss of each corpus in nats a token and, for a GPT, in bits a byte (loss * tokens /
bytes / ln 2), which models of other tokenizers can be compared by; for a blend also the mean by its
weights. Reads every window of the validation split once, or `--samples` of them, evenly spread.
Runs in one process on whatever is here, in fp32, however the model was cut when it was trained.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))

import torch
from rich.box import HORIZONTALS
from rich.progress import track
from rich.table import Table

from frontier_llm.config import RunConfig
from frontier_llm.data.batch import AnyBatch
from frontier_llm.data.corpora import Corpora, open_data
from frontier_llm.data.reading import make_batch_maker, window_corpus
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.model.build import Model
from frontier_llm.trainer.pipeline import Pipeline
from tools.console import wide_console
from tools.one_rank import on_one_rank, whole_model
from tools.options import at_least, ending, new_file


@dataclass(frozen=True)
class Score:
    """How well one corpus is predicted."""

    corpus: str
    weight: float
    """Its share in the samples of the run."""
    samples: int
    loss: float
    """Nats a token."""
    bits_per_byte: float | None
    """None where not every token is predicted (spans)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate and print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--checkpoint", type=Path, help="another one than the newest")
    parser.add_argument("--samples", type=at_least(1), help="of each corpus (default: all)")
    parser.add_argument("--json", type=new_file, help="write the figures here as well")
    options = parser.parse_args(arguments)
    config = on_one_rank(options.run)
    corpora = open_data(config.data)
    device = Accelerator.of_rank(0).device
    with whole_model(config, options.checkpoint or options.run, device) as (model, _):
        scores = evaluate(config, corpora, model, options.samples)
    show(scores)
    if options.json:
        options.json.write_text(json.dumps([asdict(score) for score in scores], indent=1))
    return 0


def evaluate(config: RunConfig, corpora: Corpora, model: Model, samples: int | None) -> list[Score]:
    """Evaluate on every corpus.

    Args:
        config: of one rank.
        corpora: what the run reads.
        model: whole.
        samples: of each corpus; None = all.

    Raises:
        DataError: a validation split has no whole sample.
    """
    for chunk in model.chunks:
        chunk.eval()
    make_batch = make_batch_maker(config, corpora)
    scores = []
    for name, corpus in zip(corpora.names, corpora.corpora, strict=True):
        windows = window_corpus(config, corpus, train=False)
        chosen = spread(len(windows), samples or len(windows))
        micro = config.data.micro_batch
        parts = [chosen[first : first + micro] for first in range(0, len(chosen), micro)]
        batches = (make_batch([windows[i] for i in part], part) for part in parts)
        loss = mean_loss(model, batches, len(parts), name)
        split = corpus.manifest.validation
        bits = loss * split.tokens / split.text_bytes / math.log(2)
        whole = config.data.objective == "causal"
        weight = corpora.weights[name]
        scores.append(Score(name, weight, len(chosen), loss, bits if whole else None))
    return scores


def spread(count: int, wanted: int) -> list[int]:
    """Choose `wanted` of range(count), evenly spread; all if there are fewer."""
    wanted = min(wanted, count)
    return [number * count // wanted for number in range(wanted)]


def mean_loss(model: Model, batches: Iterator[AnyBatch], count: int, name: str) -> float:
    """Return the mean over all samples, in nats a token."""
    device = next(model.chunks[0].parameters()).device
    pipeline = Pipeline(model)
    total, samples = 0.0, 0
    with torch.no_grad():
        for batch in track(batches, name, total=count, transient=True):
            (loss,) = pipeline.losses([batch.to(device)], train=False)
            total += loss.double().item() * batch.samples
            samples += batch.samples
    return total / samples


def show(scores: Sequence[Score]) -> None:
    """Print the table."""
    table = Table(box=HORIZONTALS, pad_edge=False)
    table.add_column("corpus")
    for heading in ("weight", "samples", "nats a token", "bits a byte"):
        table.add_column(heading, justify="right")
    for score in scores:
        bits = "-" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"
        table.add_row(
            score.corpus, f"{score.weight:.3f}", str(score.samples), f"{score.loss:.4f}", bits
        )
    if len(scores) > 1:
        mean = sum(score.weight * score.loss for score in scores)
        table.add_row("by weight", "1.000", str(sum(s.samples for s in scores)), f"{mean:.4f}", "")
    wide_console().print(table)


if __name__ == "__main__":
    sys.exit(ending(main))
