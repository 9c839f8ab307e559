"""Composed values of a model so small that eight ranks train it in a second."""

import copy
import functools
import json
from typing import Any

import yaml

from frontier_llm.cli.compose import compose, groups

TINY = (
    "model.layers=4",
    "model.hidden=32",
    "model.heads=4",
    "model.vocabulary=128",
    "model.init_std=0.1",
    "data.vocabulary=128",
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
GEMMA3 = (
    "model.layers=3", "model.positions=rotary", "model.norm=rmsnorm", "model.bias=false",
    "model.activation=geglu", "model.kv_heads=2", "model.norm_placement=both",
    "model.zero_centred_norms=true", "model.scaled_embedding=true", "model.score_width=24",
    "model.qk_norm=head", "model.window=5", "model.window_every=2", "model.rotary_base=100000",
    "model.rotary_local_base=100", "model.rotary_scaling=linear", "model.rotary_factor=4",
)  # fmt: skip
"""Of a GPT with the variants of Gemma 3, whose second layer has no window."""
T5GEMMA = (
    *TINY_T5, "model.positions=rotary", "model.scaled_attention=true", "model.kv_heads=2",
    "model.norm_placement=both", "model.zero_centred_norms=true", "model.scaled_embedding=true",
    "model.encoder_embedding=true", "model.tied=true", "model.score_width=24", "model.window=4",
    "model.encoder_window=5", "model.window_every=2", "model.attention_softcap=3",
    "model.logit_softcap=2", "model.start_token=2",
)  # fmt: skip
"""Of an encoder-decoder with the variants of T5Gemma."""
SIDES = (
    *T5GEMMA, "model.encoder_hidden=48", "model.encoder_heads=6", "model.encoder_kv_heads=2",
    "model.encoder_head_dim=12", "model.encoder_ffn=80",
)  # fmt: skip
"""The same with an encoder of other dimensions, as in T5Gemma 9B-2B."""
T5GEMMA2 = (
    *T5GEMMA, "model.cross_attention=merged", "model.encoder_embedding=false",
    "model.qk_norm=head", "model.encoder_window=2", "model.encoder_window_after=3",
    "model.attention_softcap=null", "model.rotary_base=100000", "model.rotary_local_base=100",
    "model.rotary_scaling=linear", "model.rotary_factor=4",
)  # fmt: skip
"""Of an encoder-decoder with the variants of T5Gemma 2."""
_LINK = "{{name: {}, ranks: {}, latency_us: 1, gb_per_second: 1, efficiency: 1, source: test}}"
THREE_LEVELS = [
    "cluster.links=["
    + ", ".join(_LINK.format(*link) for link in (("package", 2), ("node", 4), ("net", "null")))
    + "]"
]
"""A cluster with packages of 2 ranks in nodes."""


def tiny_values(*overrides: str) -> dict[str, Any]:
    """Compose the root configuration, shrunk, with overrides on top (the last one counts)."""
    chosen = dict(o.split("=", 1) for o in (*TINY, *overrides))
    choices = tuple(f"{key}={value}" for key, value in chosen.items() if key in _groups())
    values = copy.deepcopy(_composed(choices))
    for key, text in chosen.items():
        if key not in _groups():
            *path, last = key.split(".")
            section = functools.reduce(dict.__getitem__, path, values)
            assert last in section, key
            section[last] = _read(text)
    return values


@functools.cache
def _composed(choices: tuple[str, ...]) -> dict[str, Any]:
    """Hydra takes a quarter of a second, and few tests differ in their choices of files."""
    return compose(choices)


@functools.cache
def _groups() -> frozenset[str]:
    return frozenset(groups())


def _read(text: str) -> Any:
    try:
        return json.loads(text)  # numbers such as 1e-9, which are words to YAML
    except ValueError:
        return yaml.safe_load(text)
