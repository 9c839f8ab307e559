"""What a run says in words, on rank 0: before the first step, and after the last."""

import logging
import math
from pathlib import Path

from frontier_llm.config.checkpoint import CheckpointConfig
from frontier_llm.geometry.lengths import run_lengths
from frontier_llm.telemetry.summary import RunSummary
from frontier_llm.trainer.parts import Parts
from frontier_llm.trainer.progress import Progress
from frontier_llm.trainer.resume import Resumed
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
    tokens = config.data.global_batch * run_lengths(config).total
    vocabulary = config.model.vocabulary
    lines = {
        "run": config.run.dir,
        "model": f"{summary.model}, {format_count(summary.parameters or 0)} parameters, "
        f"{config.model.layers} layers",
        "layout": f"{grid.size} ranks = tensor {grid.tensor} x pipeline {grid.pipeline} x "
        f"data {grid.data}",
        "sharding": f"{config.sharding.name}: parameters / {factors.params}, gradients / "
        f"{factors.grads}, optimizer / {factors.optimizer}; {held} on rank 0",
        **({"collectives": _formats(parts)} if config.collectives.is_quantised else {}),
        "precision": f"{parts.choices.precision} ({parts.choices.reason})",
        "kernels": parts.kernels.source,
        "peak": peak,
        "data": f"{config.data.name}: {format_count(manifest.train.tokens)} training tokens, "
        f"{format_count(manifest.validation.tokens)} validation tokens; "
        f"{format_count(tokens)} tokens a step",
        "saved": _saved(config.checkpoint),
    }
    if summary.initial_validation_loss is not None:
        lines["untrained"] = (
            f"validation loss {summary.initial_validation_loss:.3f} nats a token "
            f"(ln {vocabulary} = {math.log(vocabulary):.2f})"
        )
    for name, words in lines.items():
        _say(name, words)


def resumed(found: Resumed, progress: Progress, validation_loss: float) -> None:
    """Say where the run goes on, and what is not as it was."""
    _say(
        "resumed",
        f"step {progress.step} of {found.folder}; validation loss {validation_loss:.3f} nats a "
        "token",
    )
    for key, (before, now) in found.changes.items():
        _say("changed", f"{key}: {before} -> {now}")


def end(summary: RunSummary, report: Path) -> None:
    """Say what the model writes, what it learned, and where the report is."""
    for sample in summary.samples:
        _say("sample", f"{sample.prompt}|{sample.text}".replace("\n", "\n" + " " * 11))
    if summary.validation_loss is not None:
        first = summary.initial_validation_loss
        before = "" if first is None else f"{first:.3f} -> "
        per_byte = summary.validation_bits_per_byte
        bits = "" if per_byte is None else f" = {per_byte:.2f} bits a byte"
        _say(
            "validation",
            f"{before}{summary.validation_loss:.3f} nats a token{bits}",
        )
    _say("done", f"{summary.exit_reason} in {format_seconds(summary.seconds or 0)}")
    _say("report", str(report))


def _saved(checkpoint: CheckpointConfig) -> str:
    if checkpoint.mode == "off":
        return "nothing, not even at the end (checkpoint=off)"
    local = checkpoint.tiers.local
    fast = f", every {local.every_steps} in {local.path}" if local.path else ""
    return f"every {checkpoint.every_steps} steps and at the end ({checkpoint.mode}){fast}"


def _formats(parts: Parts) -> str:
    """Say what travels how, and which tensors do not, and by whose hands."""
    chosen, kernels = parts.config.collectives, parts.states.kernels
    params, across = chosen.params_format, chosen.grads_across_format or chosen.grads_format
    words = (
        f"{chosen.name}: parameters {params} forward, {chosen.params_backward_format or params} "
        f"backward, {chosen.refresh_format} after the update; gradients {chosen.grads_format} in "
        f"a node, {across} between nodes; blocks of {chosen.block_elements}; norms and biases "
        f"(what is not decayed) in 16 bits; {kernels.name} kernels ({kernels.reason})"
    )
    grid = parts.groups.grid
    if parts.states.factors.optimizer == 1:
        words += "; nothing is gathered or scattered with these factors, so this saves nothing"
    elif grid.same_node(0, grid.size - 1):
        words += "; all ranks share a node, whose links may be faster than rounding"
    return words


def _say(name: str, words: str) -> None:
    _LOG.info("%-10s %s", name, words)
