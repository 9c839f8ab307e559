"""Begin an encoder-decoder with the weights of a decoder, and train its cross-attention first.

Both sides are copies of the decoder, or each of a decoder of its own. Cross-attention and its norms
begin as self-attention and its norms; if the encoder has another width, they begin anew. Source:
T5Gemma (arXiv:2504.06225).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
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


def copies(shards: Iterable[StateShard], model: ModelConfig) -> tuple[list[StateShard], ...]:
    """Return the shards of the encoder and those of the decoder that are copies of a decoder.

    They are placed in the tensors of that decoder.
    """
    of_encoder, of_decoder = list[StateShard](), list[StateShard]()
    for shard in shards:
        name = shard.record.placements[0].name
        if ".cross_attention" in name and model.encoder.hidden != model.hidden:
            continue
        boxes = (box for own in shard.record.placements for box in _copied_boxes(own, model))
        copy = replace(shard, record=replace(shard.record, placements=tuple(boxes)))
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        is_below = layer != "" and int(layer) < model.encoder_layers
        side = of_encoder if is_below or name.startswith("encoder_") else of_decoder
        side.append(copy)
    return of_encoder, of_decoder


def _copied_name(name: str, model: ModelConfig) -> str:
    name = name.replace("encoder_norm", "final_norm").removeprefix("encoder_")
    name = re.sub(r"\.(query|key_value)\.", ".qkv.", name.replace("cross_attention", "attention"))
    first = model.encoder_layers  # the first layer of the decoder
    return re.sub(r"\d+", lambda n: str(int(n[0]) - first * (int(n[0]) >= first)), name)


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
