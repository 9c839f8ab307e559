"""List the parameters of a model by name and shape, without building the model.

Names and shapes are those of the whole model and of checkpoints: not divided over tensor ranks,
without padding, and with two matrices for a gated feed-forward block. The shape of a linear weight
is [outputs, inputs].
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from frontier_llm.config.model import ModelConfig
from frontier_llm.config.optimizer import ParameterGroup
from frontier_llm.geometry.model_chunks import ModelChunk, chunk_stacks, chunk_tables


@dataclass(frozen=True)
class ParameterShape:
    """One parameter of the whole model."""

    name: str
    shape: tuple[int, ...]
    unit: str
    """Name of the unit (embedding, layer or head) with which the parameter is gathered."""
    cut_dim: int | None
    """Dim that is divided over tensor ranks; None = each tensor rank has the whole parameter."""
    group: ParameterGroup
    """The group for which weight decay and the learning rate can be set."""

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, which may be quantised, and not a norm or a bias."""
        return self.group != "norms"

    @property
    def module(self) -> str:
        """Name of its module in a layer, such as `attention.qkv`."""
        return self.name.removeprefix(f"{self.unit}.").rpartition(".")[0]

    @property
    def is_matrix_of_layer(self) -> bool:
        """Whether it is a matrix of a layer, which Muon updates as a whole."""
        return self.group == "matrices" and len(self.shape) == 2

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def padded_vocabulary(model: ModelConfig, tensor: int) -> int:
    """Return the rows of the embedding, which are padded to a multiple of `128 * tensor`."""
    block = 128 * tensor
    return -(-model.vocabulary // block) * block


def layer_parameters(model: ModelConfig, layer: int) -> Iterator[ParameterShape]:
    """Yield the parameters of one transformer layer."""
    encoder, model = model.encoder, model.side(layer)
    unit, hidden = f"layers.{layer}", model.hidden
    query, key_value = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim

    def matrix(
        name: str, shape: tuple[int, int], cut_dim: int, *, bias: bool = model.bias
    ) -> Iterator[ParameterShape]:
        yield ParameterShape(f"{unit}.{name}.weight", shape, unit, cut_dim, "matrices")
        if bias:
            # If inputs are divided (dim 1), the ranks' partial products are summed first. The
            # bias is then added once and is not divided.
            bias_cut = 0 if cut_dim == 0 else None
            yield ParameterShape(f"{unit}.{name}.bias", shape[:1], unit, bias_cut, "norms")

    yield from _branch_norms(model, f"{unit}.attention", unit)
    if is_merged := model.merges_attention(layer):
        yield from matrix("attention.query", (query, hidden), 0, bias=model.qkv_bias)
        yield from matrix("attention.key_value", (key_value, hidden), 0, bias=model.qkv_bias)
    else:
        yield from matrix("attention.qkv", (query + key_value, hidden), 0, bias=model.qkv_bias)
    yield from _query_key_norms(model, f"{unit}.attention", unit)
    yield from matrix("attention.output", (hidden, query), 1)
    if model.reads_encoder(layer) and not is_merged:
        yield from _branch_norms(model, f"{unit}.cross_attention", unit)
        yield from matrix("cross_attention.query", (query, hidden), 0, bias=model.qkv_bias)
        shape = key_value, encoder.hidden
        yield from matrix("cross_attention.key_value", shape, 0, bias=model.qkv_bias)
        yield from matrix("cross_attention.output", (hidden, query), 1)
    yield from _branch_norms(model, f"{unit}.ffn", unit)
    if model.gated:
        yield from matrix("ffn.gate", (model.ffn, hidden), 0)
    yield from matrix("ffn.up", (model.ffn, hidden), 0)
    yield from matrix("ffn.down", (hidden, model.ffn), 1)


def chunk_parameters(
    model: ModelConfig, chunk: ModelChunk, sequence_length: int, *, of_layers: bool = True
) -> Iterator[ParameterShape]:
    """Yield the parameters of one model chunk; learned positions have `sequence_length` rows.

    Those inside of layers are left out without `of_layers`. If several chunks need a parameter, it
    is yielded for each of them. This happens to a table that is both embedding and head, and to the
    relative positions of a stack (see `shared_parameters`).
    """
    tables, table = chunk_tables(model, chunk), (model.vocabulary, model.hidden)
    if "encoder_embedding" in tables:
        name, of_encoder = "encoder_embedding", (model.vocabulary, model.encoder.hidden)
        yield ParameterShape(f"{name}.tokens.weight", of_encoder, name, 0, "embedding")
    if "embedding" in tables or (chunk.has_head and model.tied):
        yield ParameterShape("embedding.tokens.weight", table, "embedding", 0, "embedding")
    if chunk.has_embedding and model.positions == "learned":
        shape = (sequence_length, model.hidden)
        yield ParameterShape("embedding.positions.weight", shape, "positions", None, "embedding")
    for stack in chunk_stacks(model, chunk):
        side = model.side(stack.layers.start)
        if model.positions == "relative" and stack.layers:
            shape = (model.relative_buckets, side.heads)
            name = f"{stack.positions}.weight"
            yield ParameterShape(name, shape, stack.positions_unit, 1, "embedding")
        for layer in stack.layers if of_layers else ():
            yield from layer_parameters(model, layer)
        if stack.ends:
            yield from _norm(side, stack.norm_unit, stack.norm_unit)
    if chunk.has_head and not model.tied:
        yield ParameterShape("head.weight", table, "head", 0, "head")


def shared_parameters(
    model: ModelConfig, chunks: Sequence[ModelChunk]
) -> dict[str, tuple[ModelChunk, ...]]:
    """Return the parameters that several chunks have: for each name, these chunks.

    Chunks on one stage share a table that is both embedding and head. Otherwise each chunk has a
    copy, and the gradients of the copies must be added up. Only the first chunk counts the
    parameter and saves it to checkpoints.
    """
    chunks_by_name: defaultdict[str, list[ModelChunk]] = defaultdict(list)
    for chunk in chunks:
        # no two chunks have parameters of the same layer
        for shape in chunk_parameters(model, chunk, sequence_length=1, of_layers=False):
            chunks_by_name[shape.name].append(chunk)
    return {name: tuple(owners) for name, owners in chunks_by_name.items() if len(owners) > 1}


def count_parameters(model: ModelConfig, sequence_length: int) -> int:
    """Count the parameters of the whole model. A parameter with several copies counts once."""
    return sum(math.prod(shape) for shape in model_shapes(model, sequence_length).values())


def model_shapes(model: ModelConfig, sequence_length: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the whole model, by its global name."""
    whole = ModelChunk(0, 0, range(model.layers), has_embedding=True, has_head=True)
    parameters = chunk_parameters(model, whole, sequence_length)
    return {parameter.name: parameter.shape for parameter in parameters}


def _query_key_norms(model: ModelConfig, attention: str, unit: str) -> Iterator[ParameterShape]:
    if model.qk_norm == "none":
        return
    for name, heads in (("query_norm", model.heads), ("key_norm", model.kv_heads)):
        # weights that all heads share are on every tensor rank
        width, cut = (
            (heads * model.head_dim, 0) if model.qk_norm == "width" else (model.head_dim, None)
        )
        yield ParameterShape(f"{attention}.{name}.weight", (width,), unit, cut, "norms")


def _branch_norms(model: ModelConfig, branch: str, unit: str) -> Iterator[ParameterShape]:
    yield from _norm(model, f"{branch}_norm", unit)
    if model.norm_placement == "both":
        yield from _norm(model, f"{branch}_output_norm", unit)


def _norm(model: ModelConfig, name: str, unit: str) -> Iterator[ParameterShape]:
    yield ParameterShape(f"{name}.weight", (model.hidden,), unit, None, "norms")
    if model.norm == "layernorm":
        yield ParameterShape(f"{name}.bias", (model.hidden,), unit, None, "norms")
