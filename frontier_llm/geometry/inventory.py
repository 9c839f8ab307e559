"""The parameters of a model by name and shape, without building it.

Names and shapes are global: uncut, without padding, a gated feed-forward block as two matrices.
Checkpoints use the same names. The shape of a linear weight is [out, in].
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.model_chunks import ModelChunk, chunk_stacks


@dataclass(frozen=True)
class ParameterShape:
    """One parameter of the whole model."""

    name: str
    shape: tuple[int, ...]
    unit: str
    """Name of the unit with which it is gathered and reduced."""
    cut_dim: int | None
    """Dim that is cut over tensor ranks; None = each tensor rank holds the whole parameter."""
    decayed: bool
    """Whether weight decay applies: to matrices, not to biases and norms."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def padded_vocabulary(model: ModelConfig, tensor: int, multiple: int = 128) -> int:
    """Return the rows of the embedding after padding to a multiple of `multiple * tensor`."""
    block = multiple * tensor
    return -(-model.vocabulary // block) * block


def layer_parameters(model: ModelConfig, layer: int) -> Iterator[ParameterShape]:
    """Yield the parameters of one transformer layer."""
    unit, hidden = f"layers.{layer}", model.hidden
    query, key_value = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim

    def matrix(name: str, shape: tuple[int, int], cut: int) -> Iterator[ParameterShape]:
        yield ParameterShape(f"{unit}.{name}.weight", shape, unit, cut, True)
        if model.bias:
            # partial products of a row-cut matrix are summed, so its bias is added once, uncut
            bias_cut = 0 if cut == 0 else None
            yield ParameterShape(f"{unit}.{name}.bias", shape[:1], unit, bias_cut, False)

    yield from _norm(model, f"{unit}.attention_norm", unit)
    yield from matrix("attention.qkv", (query + key_value, hidden), 0)
    yield from matrix("attention.output", (hidden, query), 1)
    if model.reads_encoder(layer):
        yield from _norm(model, f"{unit}.cross_attention_norm", unit)
        yield from matrix("cross_attention.query", (query, hidden), 0)
        yield from matrix("cross_attention.key_value", (key_value, hidden), 0)
        yield from matrix("cross_attention.output", (hidden, query), 1)
    yield from _norm(model, f"{unit}.ffn_norm", unit)
    if model.gated:
        yield from matrix("ffn.gate", (model.ffn, hidden), 0)
    yield from matrix("ffn.up", (model.ffn, hidden), 0)
    yield from matrix("ffn.down", (hidden, model.ffn), 1)


def chunk_parameters(
    model: ModelConfig, chunk: ModelChunk, sequence_length: int
) -> Iterator[ParameterShape]:
    """Yield the parameters of one model chunk.

    A parameter that several chunks need is held by each of them under the same name: a tied head
    and the embedding, and a stack's table of relative positions (see `shared_parameters`).

    Args:
        model: dimensions.
        chunk: its layers, and whether it holds the embedding and the head.
        sequence_length: rows of the learned position table.
    """
    table = (model.vocabulary, model.hidden)
    if chunk.has_embedding or (chunk.has_head and model.tied):
        yield ParameterShape("embedding.tokens.weight", table, "embedding", 0, True)
    if chunk.has_embedding and model.positions == "learned":
        shape = (sequence_length, model.hidden)
        yield ParameterShape("embedding.positions.weight", shape, "positions", None, True)
    for stack in chunk_stacks(model, chunk):
        if model.positions == "relative":
            shape = (model.relative_buckets, model.heads)
            name = f"{stack.positions}.weight"
            yield ParameterShape(name, shape, stack.positions_unit, 1, True)
        for layer in stack.layers:
            yield from layer_parameters(model, layer)
        if stack.ends:
            yield from _norm(model, stack.norm, stack.norm)
    if chunk.has_head and not model.tied:
        yield ParameterShape("head.weight", table, "head", 0, True)


def shared_parameters(
    model: ModelConfig, chunks: Sequence[ModelChunk]
) -> dict[str, tuple[ModelChunk, ...]]:
    """Return the chunks that hold each parameter of which there are several copies, by name.

    Gradients of the copies must be added up. The first of the chunks counts and saves the
    parameter.
    """
    holders: defaultdict[str, list[ModelChunk]] = defaultdict(list)
    for chunk in chunks:
        for shape in chunk_parameters(model, chunk, sequence_length=1):
            holders[shape.name].append(chunk)
    return {name: tuple(held) for name, held in holders.items() if len(held) > 1}


def count_parameters(model: ModelConfig, sequence_length: int) -> int:
    """Count the parameters of the whole model, each once."""
    return sum(math.prod(shape) for shape in model_shapes(model, sequence_length).values())


def model_shapes(model: ModelConfig, sequence_length: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the whole model, by its global name."""
    whole = ModelChunk(0, 0, range(model.layers), has_embedding=True, has_head=True)
    return {p.name: p.shape for p in chunk_parameters(model, whole, sequence_length)}


def _norm(model: ModelConfig, name: str, unit: str) -> Iterator[ParameterShape]:
    yield ParameterShape(f"{name}.weight", (model.hidden,), unit, None, False)
    if model.norm == "layernorm":
        yield ParameterShape(f"{name}.bias", (model.hidden,), unit, None, False)
