"""List the modules of a model chunk, and the units that the forward pass of each module reads.

A unit is a set of parameters that are gathered and reduced together, such as those of one layer.
The sharding package gathers a unit before a module reads it.
"""

from collections.abc import Iterator

from frontier_llm.model.chunk import Chunk
from frontier_llm.model.layer_stack import LayerStack
from frontier_llm.protocols import UnitReader


def unit_readers(chunk: Chunk, tied: bool) -> Iterator[UnitReader]:
    """Yield the readers of a model chunk, in the order of the forward pass.

    A stack of a chunk is its part of the encoder or of the decoder (of a GPT: of its layers). A
    LayerStack is a stack of a T5. It has a table of relative positions, which is a unit.
    """
    if chunk.pre_process:
        yield UnitReader(chunk.embedding, ("embedding", "positions"), in_backward=False)
    for stack in chunk.stacks:
        block = getattr(chunk, stack.name)
        if isinstance(block, LayerStack):
            yield UnitReader(block.positions, (stack.positions_unit,), in_backward=False)
        for layer, number in zip(block.layers, stack.layers, strict=True):
            yield UnitReader(layer, (f"layers.{number}",))
        if stack.ends:  # this chunk has the last layer of the encoder or decoder, and its norm
            yield UnitReader(block.final_layernorm, (stack.norm_unit,))
    if chunk.post_process:
        yield UnitReader(chunk.output_layer, ("embedding" if tied else "head",))
