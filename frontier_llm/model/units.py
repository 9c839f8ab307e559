"""Which modules read which units: where parameters must be whole."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from frontier_llm.model.chunk import Chunk
from frontier_llm.model.layer_stack import LayerStack


@dataclass(frozen=True)
class UnitReader:
    """A module and the units whose parameters its forward pass reads, exactly."""

    module: nn.Module
    units: tuple[str, ...]
    in_backward: bool = True
    """Whether its backward pass reads them too; a look-up in a table does not."""


def unit_readers(chunk: Chunk, tied: bool) -> Iterator[UnitReader]:
    """Yield the readers of one piece of the model, in the order of the forward pass."""
    if chunk.pre_process:
        yield UnitReader(chunk.embedding, ("embedding", "positions"), in_backward=False)
    for stack in chunk.stacks:
        block = getattr(chunk, stack.name)
        if isinstance(block, LayerStack):
            yield UnitReader(block.positions, (stack.positions_unit,), in_backward=False)
        for layer, number in zip(block.layers, stack.layers, strict=True):
            yield UnitReader(layer, (f"layers.{number}",))
        if stack.ends:
            yield UnitReader(block.final_layernorm, (stack.norm,))
    if chunk.post_process:
        yield UnitReader(chunk.output_layer, ("embedding" if tied else "head",))
