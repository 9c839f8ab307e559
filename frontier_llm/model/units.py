"""Which modules read which units: where parameters must be whole."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from frontier_llm.model.gpt import Gpt


@dataclass(frozen=True)
class UnitReader:
    """A module and the units whose parameters its forward pass reads, exactly."""

    module: nn.Module
    units: tuple[str, ...]
    in_backward: bool = True
    """Whether its backward pass reads them too; a look-up in a table does not."""


def unit_readers(chunk: Gpt, tied: bool) -> Iterator[UnitReader]:
    """Yield the readers of one piece of the model, in the order of the forward pass."""
    if chunk.pre_process:
        yield UnitReader(chunk.embedding, ("embedding", "positions"), in_backward=False)
    for layer, number in zip(chunk.decoder.layers, chunk.piece.layers, strict=True):
        yield UnitReader(layer, (f"layers.{number}",))
    if chunk.post_process:
        yield UnitReader(chunk.decoder.final_layernorm, ("final_norm",))
        yield UnitReader(chunk.output_layer, ("embedding" if tied else "head",))
