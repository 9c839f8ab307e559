"""Composed values of a model so small that eight ranks train it in a second."""

from typing import Any

from tools.compose import compose

TINY = (
    "model.layers=4",
    "model.hidden=32",
    "model.heads=4",
    "model.vocabulary=128",
    "model.init_std=0.1",
    "data.pieces=128",
    "data.sequence_length=16",
    "data.global_batch=8",
    "data.micro_batch=1",
    "parallel.pipeline=1",
    "optimizer.clip_norm=null",
    "optimizer.warmup_steps=0",
    "precision=fp32",
)
TINY_T5 = (
    "model=mt5_tiny",
    "model.head_dim=8",
    "model.ffn=64",
    "model.relative_buckets=8",
    "model.relative_distance=12",
    "model.init_std=1.0",
    "data=stdlib_spans",
)
"""Of an encoder-decoder: two layers each, lengths 16 and 8."""


def tiny_values(*overrides: str) -> dict[str, Any]:
    """Compose the root configuration, shrunk, with overrides on top (the last one counts)."""
    chosen = dict(o.split("=", 1) for o in (*TINY, *overrides))
    return compose([f"{key}={value}" for key, value in chosen.items()])
