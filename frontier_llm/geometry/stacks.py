"""Stacks: runs of like layers on a piece of the pipeline.

A GPT is one stack, the decoder. An encoder-decoder is one list of layers, the encoder's first, cut
anywhere: a piece holds layers of the encoder, of the decoder, or of both.
"""

from dataclasses import dataclass
from typing import Literal

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.stages import Piece


@dataclass(frozen=True)
class Stack:
    """The part of a stack that lies on one piece."""

    name: Literal["encoder", "decoder"]
    layers: range
    """At least one, numbered through the whole model."""
    ends: bool
    """Whether its last layer is here, and with it the norm that follows."""

    @property
    def norm(self) -> str:
        """Name and unit of the norm behind its last layer."""
        return "encoder_norm" if self.name == "encoder" else "final_norm"

    @property
    def positions(self) -> str:
        """Name of the table of relative positions, of which each piece has a copy."""
        return f"{self.name}_positions"

    @property
    def positions_unit(self) -> str:
        """Unit of that table: the first layer's, as both are needed at once."""
        return f"layers.{self.layers[0]}"


def piece_stacks(model: ModelConfig, piece: Piece) -> tuple[Stack, ...]:
    """Return the stacks of a piece, in the order of the forward pass."""
    start, stop, border = piece.layers.start, piece.layers.stop, model.encoder_layers
    encoder, decoder = range(start, min(stop, border)), range(max(start, border), stop)
    stacks = []
    if encoder:
        stacks.append(Stack("encoder", encoder, ends=encoder.stop == border))
    if decoder:
        stacks.append(Stack("decoder", decoder, ends=piece.has_head))
    return tuple(stacks)
