"""Describe each parameter of a rank by a `ParameterRecord`, which other packages work with.

A record gives the global names of the tensors in a parameter, which are their names in the whole
model and do not depend on the layout. The tables below translate megatron's names to global names.
All other facts about a parameter come from geometry/inventory.py.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.inventory import ParameterShape, chunk_parameters, shared_parameters
from frontier_llm.geometry.model_chunks import ModelChunk, Stack
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.chunk import Chunk
from frontier_llm.parallel.groups import Groups
from frontier_llm.protocols import ParameterRecord, Placement

# megatron's names of modules and parameters -> global names
_LAYER_MODULES = {
    "input_layernorm": "attention_norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.output",
    "self_attention.norms.query": "attention.query_norm",
    "self_attention.norms.key": "attention.key_norm",
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
class _ChunkContext:
    """The inputs of all records of one model chunk."""

    model: ModelConfig
    groups: Groups
    shapes: dict[str, ParameterShape]
    shared: dict[str, tuple[ModelChunk, ...]]
    """For each parameter that several model chunks have (such as a tied embedding), the chunks that
    have it, in order; by global name."""


def parameter_records(
    chunks: Sequence[Chunk], layout: ResolvedLayout, groups: Groups
) -> list[ParameterRecord]:
    """Describe every trainable parameter of this rank, in the order of the forward pass."""
    records: dict[nn.Parameter, ParameterRecord] = {}
    model = layout.model
    shared = shared_parameters(model, layout.model_chunks)
    for chunk in chunks:
        shapes = chunk_parameters(model, chunk.model_chunk, layout.sequence_length)
        context = _ChunkContext(model, groups, {shape.name: shape for shape in shapes}, shared)
        for local_name, parameter in chunk.named_parameters():
            if parameter in records:  # two chunks of this stage read it
                records[parameter] = replace(records[parameter], passes=2)
                continue
            name = _global_name(local_name, chunk.stacks, model.tied)
            records[parameter] = _record(context, name, parameter, chunk.model_chunk)
    return list(records.values())


def _global_name(local_name: str, stacks: Sequence[Stack], tied: bool) -> str:
    if local_name == "output_layer.weight" and tied:
        return _OTHER_PARAMETERS["embedding.word_embeddings.weight"]
    if local_name in _OTHER_PARAMETERS:
        return _OTHER_PARAMETERS[local_name]
    match = _STACK_PARAMETER.fullmatch(local_name)
    if match is None:
        raise KeyError(f"{local_name} is not in the tables of model/parameter_records.py")
    stack = next(stack for stack in stacks if stack.name == match[1])
    return f"{_stack_module(stack, match[2])}.{match[3]}"


def _stack_module(stack: Stack, module: str) -> str:
    if module == "final_layernorm":
        return stack.norm_unit
    if module == "positions":
        return stack.positions
    match = _LAYER_MODULE.fullmatch(module)
    if match is None or match[2] not in _LAYER_MODULES:
        raise KeyError(f"{stack.name}.{module} is not in the tables of model/parameter_records.py")
    return f"layers.{stack.layers[int(match[1])]}.{_LAYER_MODULES[match[2]]}"


def _record(
    context: _ChunkContext, name: str, parameter: nn.Parameter, model_chunk: ModelChunk
) -> ParameterRecord:
    shape = context.shapes[name]
    fused_names = [name]
    if context.model.gated and ".ffn.up." in name:
        fused_names = [name.replace(".ffn.up.", ".ffn.gate."), name]  # megatron fuses [gate; up]
    placements = tuple(_placements(context, fused_names, parameter))
    chunks_with_copies = context.shared.get(name, (model_chunk,))
    is_first_copy = model_chunk == chunks_with_copies[0]
    is_replicated = shape.cut_dim is None
    return ParameterRecord(
        parameter=parameter,
        unit=shape.unit,
        placements=placements,
        group=shape.group,
        tensor_dim=shape.cut_dim,
        fused=_fused_rows(context.model, name, parameter),
        rate_factor=context.model.width_factor if shape.group == "matrices" else 1.0,
        counted=is_first_copy and (not is_replicated or context.groups.coordinates.tensor == 0),
        tensor_partial=bool(getattr(parameter, "sequence_parallel", False)),
        tied=len(chunks_with_copies) > 1,
    )


def _fused_rows(model: ModelConfig, name: str, parameter: nn.Parameter) -> tuple[int, ...]:
    """Return `ParameterRecord.fused`, for megatron's order of rows."""
    head, queries = model.head_dim, model.heads // model.kv_heads
    if name.endswith(".attention.qkv.weight"):
        return queries * head, head, head
    if name.endswith(".cross_attention.key_value.weight"):
        return head, head
    if name.endswith(".ffn.up.weight") and model.gated:
        return (parameter.shape[0] // 2,) * 2
    return ()


def _placements(
    context: _ChunkContext, fused_names: Sequence[str], parameter: nn.Parameter
) -> Iterator[Placement]:
    """Yield the placement of each of the global tensors that are fused in a parameter.

    A placement tells which part of the global tensor lies where in the parameter. The fused tensors
    are equal slices of dimension 0, and each of them is divided over tensor-parallel ranks.
    """
    tensor_rank = context.groups.coordinates.tensor
    for index, name in enumerate(fused_names):
        whole = context.shapes[name].shape
        cut = context.shapes[name].cut_dim
        slice_shape = list(parameter.shape)
        slice_shape[0] //= len(fused_names)
        local_start, global_start = [0] * len(slice_shape), [0] * len(slice_shape)
        local_start[0] = index * slice_shape[0]
        unpadded = list(slice_shape)
        if cut is not None:
            global_start[cut] = tensor_rank * slice_shape[cut]
            # rows beyond the end of the global tensor are padding of the vocabulary
            unpadded[cut] = max(0, min(slice_shape[cut], whole[cut] - global_start[cut]))
            global_start[cut] = min(global_start[cut], whole[cut])
        yield Placement(name, whole, tuple(global_start), tuple(local_start), tuple(unpadded))
