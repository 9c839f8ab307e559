"""Build the modules and parameter records of one rank, and set the initial weights.

trainer/assemble.py calls `build_model`. A *model chunk* is a range of consecutive layers, and a
*unit* a set of parameters that are gathered and reduced together, such as those of one layer. The
sharding package gathers a unit before a module reads it. A *record* describes a parameter for other
packages. It gives the global names of the tensors in a parameter, which are their names in the
whole model and do not depend on the layout. The tables below translate megatron's names to global
names. All other facts about a parameter come from geometry/inventory.py.

The initial weights are the same for every parallel layout.

A weight depends only on the seed and on the global name of its tensor. Each tensor is drawn in
blocks of rows, and each block has its own seed. A rank draws only the blocks that overlap with its
part of the tensor, so it never holds a full matrix.

Norms start at 1 (at 0 if they are zero-centred), biases at 0. Matrices are normally distributed
with the standard deviation `model.init_std` times a factor:

- GPT: 1 / sqrt(2 * layers) for the two matrices that end a residual branch, and 1 for all others
  (GPT-2; Radford et al., 2019, section 2.3). With muP the factor of the matrices of layers is also
  multiplied by sqrt(base width / width) (Tensor Programs V, arXiv:2203.03466, table 8).
- T5: 1 for the embedding, and 1 / sqrt(number of inputs) for other matrices. The factor of queries
  is also divided by sqrt(head width), since T5 does not scale attention scores (as in the code of
  T5 1.1).
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from frontier_llm.config.model import ModelConfig
from frontier_llm.device.kernels import Kernels
from frontier_llm.geometry.inventory import ParameterShape, chunk_parameters, shared_parameters
from frontier_llm.geometry.model_chunks import ModelChunk, Stack
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.chunk import Chunk
from frontier_llm.model.transformer import transformer_config
from frontier_llm.parallel.groups import Groups
from frontier_llm.protocols import ParameterRecord, Placement, UnitReader

COMPILER = "inductor"
BLOCK_ELEMENTS = 1 << 20
"""Maximum number of elements per block, unless one row has more."""
_BRANCH_ENDS = (".attention.output.weight", ".ffn.down.weight")
"""Suffixes of the names of the matrices that end a residual branch of a GPT."""
# megatron's names of modules and parameters -> global names
_LAYER_MODULES = {
    "attention_norms.0": "attention_norm",
    "attention_norms.1": "attention_output_norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_q": "attention.query",
    "self_attention.linear_kv": "attention.key_value",
    "self_attention.linear_proj": "attention.output",
    "self_attention.norms.query": "attention.query_norm",
    "self_attention.norms.key": "attention.key_norm",
    "cross_attention_norms.0": "cross_attention_norm",
    "cross_attention_norms.1": "cross_attention_output_norm",
    "cross_attention.linear_q": "cross_attention.query",
    "cross_attention.linear_kv": "cross_attention.key_value",
    "cross_attention.linear_proj": "cross_attention.output",
    "mlp_norms.0": "ffn_norm",
    "mlp_norms.1": "ffn_output_norm",
    "mlp.linear_fc1": "ffn.up",
    "mlp.linear_fc2": "ffn.down",
}
_OTHER_PARAMETERS = {
    "encoder_embedding.word_embeddings.weight": "encoder_embedding.tokens.weight",
    "embedding.word_embeddings.weight": "embedding.tokens.weight",
    "embedding.position_embeddings.weight": "embedding.positions.weight",
    "output_layer.weight": "head.weight",
}
_STACK_PARAMETER = re.compile(r"(encoder|decoder)\.(?:layers\.(\d+)\.)?(.+)\.(weight|bias)")
_LAYER_MODULE = re.compile(r"layers\.(\d+)\.(.+)")


def _compile_layers(chunks: Sequence[Chunk]) -> None:
    """Replace the forward pass of each layer by one that is compiled at its first call.

    Hooks of a layer run outside the compiled code, so parameters can be gathered and released as
    usual. Each new length of a sequence would be compiled again, which is why samples are generated
    without compiled code (Pipeline.logits).
    """
    for chunk in chunks:
        for stack in chunk.stacks:
            for layer in getattr(chunk, stack.name).layers:
                layer.forward = torch.compile(layer.forward, dynamic=False, backend=COMPILER)


def unit_readers(chunk: Chunk, tied: bool) -> Iterator[UnitReader]:
    """Yield the readers of a model chunk, in the order of the forward pass."""
    if chunk.encoder_embedding is not None:
        yield UnitReader(chunk.encoder_embedding, ("encoder_embedding",), in_backward=False)
    if chunk.embedding is not None:
        yield UnitReader(chunk.embedding, ("embedding", "positions"), in_backward=False)
    for stack in chunk.stacks:
        block = getattr(chunk, stack.name)
        if block.positions is not None:
            yield UnitReader(block.positions, (stack.positions_unit,), in_backward=False)
        for layer, number in zip(block.layers, stack.layers, strict=True):
            yield UnitReader(layer, (f"layers.{number}",))
        if stack.ends:  # this chunk has the last layer of the encoder or decoder, and its norm
            yield UnitReader(block.final_layernorm, (stack.norm_unit,))
    if chunk.model_chunk.has_head:
        yield UnitReader(chunk.output_layer, ("embedding" if tied else "head",))


def initialise(records: Iterable[ParameterRecord], model: ModelConfig, seed: int) -> None:
    """Set the initial value of every parameter of this rank. Padding is set to zero."""
    for record in records:
        local = record.parameter.data
        if local.is_meta:  # trainer/dry_run.py builds the model only for its shapes
            continue
        local.zero_()
        for placement in record.placements:
            _fill(local, placement, model, seed)


def _fill(local: torch.Tensor, placement: Placement, model: ModelConfig, seed: int) -> None:
    """Initialise the part of a local parameter that a placement describes.

    A `Placement` tells which part of which global tensor lies where in the local parameter.
    """
    if placement.name.endswith(".bias"):
        return
    view = placement.local_view(local)
    if "norm." in placement.name:
        view.fill_(0.0 if model.zero_centred_norms else 1.0)
        return
    factor = {"gpt": _gpt_factor, "t5": _t5_factor}[model.kind]
    deviation = model.init_std * factor(placement, model)
    _fill_normal(view, placement, deviation, seed)
    is_small = model.kind == "t5" and not model.scaled_attention
    if is_small and placement.name.endswith(".attention.qkv.weight"):
        _shrink_queries(view, placement, model)


def _gpt_factor(placement: Placement, model: ModelConfig) -> float:
    """Return the standard deviation of a GPT's matrix divided by `init_std`."""
    name = placement.name
    factor = math.sqrt(model.width_factor) if name.startswith("layers.") else 1.0
    return factor / math.sqrt(2 * model.layers) if name.endswith(_BRANCH_ENDS) else factor


def _t5_factor(placement: Placement, model: ModelConfig) -> float:
    """Return the standard deviation of a T5's matrix divided by `init_std`."""
    name, (_, inputs) = placement.name, placement.global_shape
    if "embedding." in name and not model.scaled_embedding:
        return 1.0
    if "_positions." in name:
        inputs = (model.encoder if name.startswith("encoder") else model).hidden
    is_small = name.endswith(".query.weight") and not model.scaled_attention
    return 1 / math.sqrt(inputs * (model.head_dim if is_small else 1))


def _shrink_queries(view: torch.Tensor, placement: Placement, model: ModelConfig) -> None:
    """Divide the query rows of a fused matrix by sqrt(head width).

    It is ordered by head of keys: its queries, its key, its value.
    """
    model = _layer_side(placement.name, model)
    first_row, width = placement.global_start[0], model.head_dim
    rows = torch.arange(first_row, first_row + placement.shape[0], device=view.device)
    queries = model.heads // model.kv_heads
    view[rows % ((queries + 2) * width) < queries * width] /= math.sqrt(width)


def _fill_normal(view: torch.Tensor, placement: Placement, deviation: float, seed: int) -> None:
    """Draw the blocks of rows that overlap with a placement, and copy the overlaps."""
    global_rows, global_columns = placement.global_shape
    (row, column), (height, width) = placement.global_start, placement.shape
    if not height or not width:
        return  # this rank has only padding
    block_rows = max(1, BLOCK_ELEMENTS // global_columns)
    for block in range(row // block_rows, -(-(row + height) // block_rows)):
        block_start = block * block_rows
        block_end = min(block_start + block_rows, global_rows)
        generator = torch.Generator(view.device)
        generator.manual_seed(_block_seed(seed, placement.name, block))
        drawn = torch.empty(block_end - block_start, global_columns, device=view.device)
        drawn.normal_(0.0, deviation, generator=generator)
        start, end = max(block_start, row), min(block_end, row + height)
        view[start - row : end - row].copy_(
            drawn[start - block_start : end - block_start, column : column + width]
        )


def _block_seed(seed: int, name: str, block: int) -> int:
    """Return the seed of a block of rows of a global matrix: 63 bits."""
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


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
    if match is None or (match[2] and match[3] not in _LAYER_MODULES):
        raise KeyError(f"{local_name} is not in the tables of model/build.py")
    side, layer, module, kind = match.groups()
    stack = next(stack for stack in stacks if stack.name == side)
    if layer is not None:
        return f"layers.{stack.layers[int(layer)]}.{_LAYER_MODULES[module]}.{kind}"
    names = {"final_layernorm": stack.norm_unit, "positions": stack.positions}
    return f"{names[module]}.{kind}"


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
    model = _layer_side(name, model)
    head, queries = model.head_dim, model.heads // model.kv_heads
    if name.endswith(".attention.qkv.weight"):
        return queries * head, head, head
    if name.endswith("attention.key_value.weight"):
        return head, head
    if name.endswith(".ffn.up.weight") and model.gated:
        return (parameter.shape[0] // 2,) * 2
    return ()


def _layer_side(name: str, model: ModelConfig) -> ModelConfig:
    """Return the model with the dimensions of the layer to which a parameter belongs, if any."""
    match = _LAYER_MODULE.fullmatch(name)
    return model if match is None else model.side(int(match[1]))


def _placements(
    context: _ChunkContext, fused_names: Sequence[str], parameter: nn.Parameter
) -> Iterator[Placement]:
    """Yield the placement of each of the global tensors that are fused in a parameter.

    The fused tensors are equal slices of dimension 0, each divided over tensor-parallel ranks.
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


@dataclass(frozen=True)
class Model:
    """The part of the model that this rank holds."""

    chunks: list[Chunk]
    records: list[ParameterRecord]
    layout: ResolvedLayout
    transformer: TransformerConfig
    """megatron's configuration, which all chunks share."""
    is_compiled: bool = False
    """Whether torch.compile compiles the layers, or functions of them."""


def build_model(
    layout: ResolvedLayout, groups: Groups, device: torch.device, kernels: Kernels, seed: int
) -> Model:
    """Build and initialise this rank's model chunks.

    Ranks do not communicate: each rank draws its own part of the initial weights.
    """
    transformer = transformer_config(layout, device, compiles_functions=kernels.compiles_functions)
    with device:
        chunks = [
            Chunk(layout, model_chunk, transformer, groups.tensor, kernels, groups.context)
            for model_chunk in layout.chunks_of_stage(groups.coordinates.pipeline)
        ]
    if kernels.compiles_layers:
        _compile_layers(chunks)
    _share_table(chunks, layout)
    for chunk in chunks:
        chunk.to(device=device, dtype=transformer.params_dtype)
        chunk.train()
    records = parameter_records(chunks, layout, groups)
    initialise(records, layout.model, seed)
    is_compiled = kernels.compiles_layers or kernels.compiles_functions
    return Model(chunks, records, layout, transformer, is_compiled)


def _share_table(chunks: Sequence[Chunk], layout: ResolvedLayout) -> None:
    """Let the last model chunk read the tied table of another one, if both are on this stage."""
    tables = [chunk.embedding for chunk in chunks[:-1] if chunk.embedding is not None]
    last = chunks[-1]
    if layout.model.tied and tables and last.model_chunk.has_head:
        last.output_layer.weight = tables[0].word_embeddings.weight
