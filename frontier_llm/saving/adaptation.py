"""Begin an encoder-decoder with the weights of a decoder, and train its cross-attention first.

Both sides are copies of the decoder, or each of a decoder of its own. Cross-attention and its norms
begin as self-attention and its norms; if the encoder has another width, they begin anew. Source:
T5Gemma (arXiv:2504.06225).
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from frontier_llm.config.model import SIZES, ModelConfig
from frontier_llm.errors import ConfigError

if TYPE_CHECKING:
    from frontier_llm.protocols import ParameterRecord, Placement, StateShard
    from frontier_llm.sharding.sharded_states import ShardedStates


def without_cross_attention(states: "ShardedStates") -> "frozenset[ParameterRecord]":
    """Return all parameters of a rank but those of cross-attention and its norms."""
    records = (record for unit in states.all_units for record in unit.records)
    return frozenset(record for record in records if ".cross_attention" not in record.name)


def missed_updates(states: "ShardedStates", progress: Mapping[str, Any]) -> dict[str, int]:
    """Return by name how many updates have left a parameter out; `progress` is that of the run."""
    missed = progress.get("cross_attention_updates", 0)
    return {record.name: missed for record in without_cross_attention(states) if missed}


def copies(shards: "Iterable[StateShard]", model: ModelConfig) -> "tuple[list[StateShard], ...]":
    """Return the shards of the encoder and those of the decoder that are copies of a decoder.

    They are placed in the tensors of that decoder.
    """
    sides: tuple[list[StateShard], list[StateShard]] = ([], [])
    for shard in shards:
        name = shard.record.placements[0].name
        if ".cross_attention" in name and model.encoder.hidden != model.hidden:
            continue
        boxes = (box for own in shard.record.placements for box in _copied_boxes(own, model))
        copy = replace(shard, record=replace(shard.record, placements=tuple(boxes)))
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        is_below = layer != "" and int(layer) < model.encoder_layers
        sides[0 if is_below or name.startswith("encoder_") else 1].append(copy)
    return sides


def alone(model: ModelConfig, side: str) -> ModelConfig:
    """Return a decoder with the layers of a side; `both` sides have as many."""
    of_decoder = model.layers - model.encoder_layers
    changed: dict[str, Any] = {"kind": "gpt", "encoder_layers": 0, "encoder_window": None}
    changed |= {"layers": of_decoder if side == "decoder" else model.encoder_layers}
    changed |= {"encoder_embedding": False, "encoder_window_after": None, "start_token": 0}
    changed |= {"cross_attention": "separate"} | {f"encoder_{size}": None for size in SIZES}
    return model.model_copy(update=changed)


def check_copies(model: ModelConfig, stored: Collection[str], source: str, side: str) -> None:
    """Refuse sides that cannot be copies of the decoder of a setting, whose names are `stored`."""
    for size in SIZES if side == "both" else ():
        if (own := getattr(model.encoder, size)) != getattr(model, size):
            raise ConfigError(
                f"model.encoder_{size}",
                own,
                f"{getattr(model, size)} or null: both sides copy the layers of {source}",
                f"set model.encoder_{size}=null, or run.init_encoder_from to another decoder",
            )
    layers = len({name.split(".")[1] for name in stored if name.startswith("layers.")})
    own = model.encoder_layers, model.layers - model.encoder_layers
    wanted = {"both": (layers, layers), "encoder": (layers, own[1]), "decoder": (own[0], layers)}
    if own != wanted[side]:
        encoder, decoder = wanted[side]
        copied = "both sides copy" if side == "both" else f"the {side} copies"
        raise ConfigError(
            "model.layers",
            f"{model.layers}, of which {own[0]} are the encoder's",
            f"{encoder + decoder}, of which {encoder} are the encoder's: {copied} the {layers} "
            f"layers of {source}",
            f"set model.layers={encoder + decoder} model.encoder_layers={encoder}",
        )
    if model.head_factor != 1 and side != "encoder":
        raise ConfigError(
            "model.tied",
            "true, with model.scaled_embedding=false",
            f"false: a tied encoder-decoder scales its logits, unlike the decoder of {source}",
            "choose a decoder with model.tied=false or model.scaled_embedding=true",
        )


def _copied_name(name: str, model: ModelConfig) -> str:
    name = name.replace("encoder_norm", "final_norm").removeprefix("encoder_")
    name = re.sub(r"\.(query|key_value)\.", ".qkv.", name.replace("cross_attention", "attention"))
    first = model.encoder_layers  # the first layer of the decoder
    return re.sub(r"\d+", lambda n: str(int(n[0]) - first * (int(n[0]) >= first)), name)


def _copied_boxes(own: "Placement", model: ModelConfig) -> "Iterator[Placement]":
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
        yield replace(
            own,
            name=name,
            global_shape=(model.kv_heads * of_head, *own.global_shape[1:]),
            global_start=(row, *own.global_start[1:]),
            local_start=(head * rows, *own.local_start[1:]),
            shape=(rows, *own.shape[1:]),
        )
