"""The parameters of megatron's modules as records with global names.

A row of the table says: megatron's name, our name, the dim that tensor ranks cut, and whether
weight decay applies. It must agree with geometry/inventory.py, which a test holds.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.inventory import ParameterShape, copies, piece_parameters
from frontier_llm.geometry.stacks import Stack
from frontier_llm.geometry.stages import Piece
from frontier_llm.model.chunk import Chunk
from frontier_llm.parallel.groups import Groups
from frontier_llm.protocols import ParameterRecord, Placement

_LAYER_MODULES = {
    "input_layernorm": "attention_norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.output",
    "pre_cross_attn_layernorm": "cross_attention_norm",
    "cross_attention.linear_q": "cross_attention.query",
    "cross_attention.linear_kv": "cross_attention.key_value",
    "cross_attention.linear_proj": "cross_attention.output",
    "pre_mlp_layernorm": "ffn_norm",
    "mlp.linear_fc1": "ffn.up",
    "mlp.linear_fc2": "ffn.down",
}
_OTHER_PARAMETERS = {
    "embedding.word_embeddings.weight": "embedding.tokens.weight",
    "embedding.position_embeddings.weight": "embedding.positions.weight",
    "output_layer.weight": "head.weight",
}
_STACK_PARAMETER = re.compile(r"(encoder|decoder)\.(.+)\.(weight|bias)")
_LAYER_MODULE = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class _Context:
    model: ModelConfig
    groups: Groups
    shapes: dict[str, ParameterShape]
    copies: dict[str, tuple[Piece, ...]]


def parameter_records(
    chunks: Sequence[Chunk],
    model: ModelConfig,
    pieces: Sequence[Piece],
    sequence_length: int,
    groups: Groups,
) -> list[ParameterRecord]:
    """Describe every trainable parameter of this rank, by chunk, in the order of the forward pass.

    Args:
        chunks: this rank's pieces of the model.
        model: dimensions.
        pieces: the whole pipeline, in the model's order.
        sequence_length: rows of the learned position table.
        groups: where this rank stands.

    Raises:
        KeyError: megatron has a parameter that the table does not know.
    """
    records = []
    held_twice = copies(model, pieces)
    for chunk in chunks:
        piece = chunk.piece
        shapes = {s.name: s for s in piece_parameters(model, piece, sequence_length)}
        context = _Context(model, groups, shapes, held_twice)
        for local_name, parameter in chunk.named_parameters():
            name = _global_name(local_name, chunk.stacks, model.tied)
            records.append(_record(context, name, parameter, piece))
    return records


def _global_name(local_name: str, stacks: Sequence[Stack], tied: bool) -> str:
    if local_name == "output_layer.weight" and tied:
        return _OTHER_PARAMETERS["embedding.word_embeddings.weight"]
    if local_name in _OTHER_PARAMETERS:
        return _OTHER_PARAMETERS[local_name]
    match = _STACK_PARAMETER.fullmatch(local_name)
    if match is None:
        raise KeyError(f"{local_name} is not in the table of model/parameters.py")
    stack = next(stack for stack in stacks if stack.name == match[1])
    return f"{_stack_module(stack, match[2])}.{match[3]}"


def _stack_module(stack: Stack, module: str) -> str:
    if module == "final_layernorm":
        return stack.norm
    if module == "positions":
        return stack.positions
    match = _LAYER_MODULE.fullmatch(module)
    if match is None or match[2] not in _LAYER_MODULES:
        raise KeyError(f"{stack.name}.{module} is not in the table of model/parameters.py")
    return f"layers.{stack.layers[int(match[1])]}.{_LAYER_MODULES[match[2]]}"


def _record(context: _Context, name: str, parameter: nn.Parameter, piece: Piece) -> ParameterRecord:
    model, at = context.model, context.groups.at
    shape = context.shapes[name]
    parts = [name]
    if model.gated and ".ffn.up." in name:
        parts = [name.replace(".ffn.up.", ".ffn.gate."), name]  # megatron fuses [gate; up]
    placements = tuple(_placements(context, parts, parameter))
    holders = context.copies.get(name, (piece,))
    is_copy = piece != holders[0]
    replicated = shape.cut_dim is None
    return ParameterRecord(
        parameter=parameter,
        unit=shape.unit,
        placements=placements,
        decayed=shape.decayed,
        counted=not is_copy and (not replicated or at.tensor == 0),
        tensor_partial=bool(getattr(parameter, "sequence_parallel", False)),
        tied=len(holders) > 1,
    )


def _placements(
    context: _Context, parts: Sequence[str], parameter: nn.Parameter
) -> Iterator[Placement]:
    """Place each fused part: equal slices of dim 0, each cut over tensor ranks by itself."""
    rank = context.groups.at.tensor
    for index, part in enumerate(parts):
        shape = context.shapes[part]
        local = list(parameter.shape)
        local[0] //= len(parts)
        local_start, global_start, extent = [0] * len(local), [0] * len(local), list(local)
        local_start[0] = index * local[0]
        if shape.cut_dim is not None:
            cut = shape.cut_dim
            global_start[cut] = rank * local[cut]
            # rows past the true vocabulary are padding
            extent[cut] = max(0, min(local[cut], shape.shape[cut] - global_start[cut]))
            global_start[cut] = min(global_start[cut], shape.shape[cut])
        yield Placement(part, shape.shape, tuple(global_start), tuple(local_start), tuple(extent))
