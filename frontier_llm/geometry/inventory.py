"""The parameters of a model by name and shape, without building it.

Global names and shapes: uncut, without padding, a gated feed-forward block as two matrices. They
are the names that checkpoints use. The shape of a linear weight is [out, in].
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.stages import Piece


@dataclass(frozen=True)
class ParameterShape:
    """One parameter of the whole model."""

    name: str
    shape: tuple[int, ...]
    unit: str
    """What it is gathered and reduced with."""
    cut_dim: int | None
    """Dim that tensor ranks cut; None = each holds all of it."""
    decayed: bool
    """Whether weight decay applies: matrices yes, biases and norms no."""

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
    query = model.heads * model.head_dim
    qkv = query + 2 * model.kv_heads * model.head_dim

    def matrix(name: str, shape: tuple[int, int], cut: int) -> Iterator[ParameterShape]:
        yield ParameterShape(f"{unit}.{name}.weight", shape, unit, cut, True)
        if model.bias:
            # a row-cut matrix sums partial products, so its bias is added once, whole
            bias_cut = 0 if cut == 0 else None
            yield ParameterShape(f"{unit}.{name}.bias", shape[:1], unit, bias_cut, False)

    yield from _norm(model, f"{unit}.attention_norm", unit)
    yield from matrix("attention.qkv", (qkv, hidden), 0)
    yield from matrix("attention.output", (hidden, query), 1)
    yield from _norm(model, f"{unit}.ffn_norm", unit)
    if model.gated:
        yield from matrix("ffn.gate", (model.ffn, hidden), 0)
    yield from matrix("ffn.up", (model.ffn, hidden), 0)
    yield from matrix("ffn.down", (hidden, model.ffn), 1)


def piece_parameters(
    model: ModelConfig, piece: Piece, sequence_length: int
) -> Iterator[ParameterShape]:
    """Yield the parameters of one piece of the pipeline.

    A tied head that lies on another piece than the embedding appears there too, under the
    embedding's name: it is a second copy.

    Args:
        model: dimensions.
        piece: which layers, and whether the embedding and the head are there.
        sequence_length: rows of the learned position table.
    """
    table = (model.vocabulary, model.hidden)
    if piece.has_embedding or (piece.has_head and model.tied):
        yield ParameterShape("embedding.tokens.weight", table, "embedding", 0, True)
    if piece.has_embedding and model.positions == "learned":
        shape = (sequence_length, model.hidden)
        yield ParameterShape("embedding.positions.weight", shape, "positions", None, True)
    for layer in piece.layers:
        yield from layer_parameters(model, layer)
    if piece.has_head:
        yield from _norm(model, "final_norm", "final_norm")
        if not model.tied:
            yield ParameterShape("head.weight", table, "head", 0, True)


def count_parameters(model: ModelConfig, sequence_length: int) -> int:
    """Count the parameters of the whole model, each once."""
    whole = Piece(0, 0, range(model.layers), has_embedding=True, has_head=True)
    return sum(p.elements for p in piece_parameters(model, whole, sequence_length))


def _norm(model: ModelConfig, name: str, unit: str) -> Iterator[ParameterShape]:
    yield ParameterShape(f"{name}.weight", (model.hidden,), unit, None, False)
    if model.norm == "layernorm":
        yield ParameterShape(f"{name}.bias", (model.hidden,), unit, None, False)
