"""What a run says in words, on rank 0: before the first step, and after the last."""

import logging
import math
from pathlib import Path

from frontier_llm.telemetry.summary import RunSummary
from frontier_llm.trainer.parts import Parts
from frontier_llm.units import format_bytes, format_count, format_seconds

_LOG = logging.getLogger(__name__)


def beginning(parts: Parts, summary: RunSummary, peak: str) -> None:
    """Say what will be trained, how it is cut, and in which precision.

    Args:
        parts: of rank 0.
        summary: what is known so far.
        peak: where the device's peak comes from, or why there is none.
    """
    config, grid, factors = parts.config, parts.groups.grid, parts.states.factors
    manifest = parts.corpus.manifest
    held = format_bytes(sum(summary.ranks[0].memory_bytes.values()))
    tokens = config.data.global_batch * config.data.sequence_length
    vocabulary = config.model.vocabulary
    lines = {
        "run": config.run.dir,
        "model": f"{summary.model}, {format_count(summary.parameters or 0)} parameters, "
        f"{config.model.layers} layers",
        "layout": f"{grid.size} ranks = tensor {grid.tensor} x pipeline {grid.pipeline} x "
        f"data {grid.data}",
        "sharding": f"{config.sharding.name}: parameters / {factors.params}, gradients / "
        f"{factors.grads}, optimizer / {factors.optimizer}; {held} on rank 0",
        "precision": f"{parts.choices.precision} ({parts.choices.reason})",
        "kernels": parts.kernels.source,
        "peak": peak,
        "data": f"{config.data.name}: {format_count(manifest.train.tokens)} training tokens, "
        f"{format_count(manifest.validation.tokens)} validation tokens; "
        f"{format_count(tokens)} tokens a step",
        "untrained": f"validation loss {summary.initial_validation_loss:.3f} nats a token "
        f"(ln {vocabulary} = {math.log(vocabulary):.2f})",
    }
    for name, words in lines.items():
        _say(name, words)


def end(summary: RunSummary, report: Path) -> None:
    """Say what the model writes, what it learned, and where the report is."""
    for sample in summary.samples:
        _say("sample", f"{sample.prompt}|{sample.text}".replace("\n", "\n" + " " * 11))
    if summary.validation_loss is not None:
        _say(
            "validation",
            f"{summary.initial_validation_loss:.3f} -> {summary.validation_loss:.3f} nats a token "
            f"= {summary.validation_bits_per_byte:.2f} bits a byte",
        )
    _say("done", f"{summary.exit_reason} in {format_seconds(summary.seconds or 0)}")
    _say("report", str(report))


def _say(name: str, words: str) -> None:
    _LOG.info("%-10s %s", name, words)
