"""Begin an encoder-decoder with the weights of a decoder, and train its cross-attention first.

Both sides are copies of the decoder. Cross-attention and its norms begin as self-attention and its
norms. Source: T5Gemma (arXiv:2504.06225).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from frontier_llm.config.model import ModelConfig
from frontier_llm.protocols import ParameterRecord, Placement, StateShard
from frontier_llm.sharding.sharded_states import ShardedStates


def without_cross_attention(states: ShardedStates) -> frozenset[ParameterRecord]:
    """Return all parameters of a rank but those of cross-attention and its norms."""
    records = (record for unit in states.all_units for record in unit.records)
    return frozenset(record for record in records if ".cross_attention" not in record.name)


def missed_updates(states: ShardedStates, progress: Mapping[str, Any]) -> dict[str, int]:
    """Return by name how many updates have left a parameter out; `progress` is that of the run."""
    missed = progress.get("cross_attention_updates", 0)
    return {record.name: missed for record in without_cross_attention(states) if missed}


def in_decoder(shard: StateShard, model: ModelConfig) -> StateShard:
    """Return a shard of an encoder-decoder, placed in the tensors of the decoder that it copies."""
    boxes = (box for own in shard.record.placements for box in _copied_boxes(own, model))
    return replace(shard, record=replace(shard.record, placements=tuple(boxes)))


def _copied_name(name: str, model: ModelConfig) -> str:
    name = name.replace("encoder_norm", "final_norm").removeprefix("encoder_")
    name = re.sub(r"\.(query|key_value)\.", ".qkv.", name.replace("cross_attention", "attention"))
    return re.sub(r"\d+", lambda layer: str(int(layer[0]) % model.encoder_layers), name)


def _copied_boxes(own: Placement, model: ModelConfig) -> Iterator[Placement]:
    # the rows of self-attention, for each head of keys: its queries, its key, its value
    queries, key_value = model.heads // model.kv_heads * model.head_dim, 2 * model.head_dim
    name, of_head = _copied_name(own.name, model), queries + key_value
    parts = {"query": (0, queries), "key_value": (queries, key_value)}
    first, rows = parts.get(own.name.split(".")[-2], (0, 0))
    if not rows:
        yield replace(own, name=name)
        return
    for head in range(own.shape[0] // rows):
        row = (own.global_start[0] // rows + head) * of_head + first
        yield Placement(
            name,
            (model.kv_heads * of_head, *own.global_shape[1:]),
            (row, *own.global_start[1:]),
            (head * rows, *own.local_start[1:]),
            (rows, *own.shape[1:]),
        )
