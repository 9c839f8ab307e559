"""Build the module of one model chunk, consecutive layers, and list what its modules read.

A unit is a set of parameters that are gathered and reduced together, such as those of one layer.
The sharding package gathers a unit before a module reads it.
"""

from collections.abc import Iterator

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from frontier_llm.device.kernels import Kernels
from frontier_llm.geometry.model_chunks import ModelChunk
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.gpt import Gpt
from frontier_llm.model.layer_stack import LayerStack
from frontier_llm.model.t5 import EncoderDecoder
from frontier_llm.parallel.groups import Groups
from frontier_llm.protocols import UnitReader

COMPILER = "inductor"
Chunk = Gpt | EncoderDecoder
"""The module of a model chunk.

Both classes have the attributes `model_chunk` (which layers the chunk has) and `stacks` (which part
of the encoder and of the decoder these are). For each stack they have a submodule of its name,
`encoder` or `decoder`, with `layers` and `final_layernorm`. If the embedding or the output layer
belongs to the chunk, they have the submodule `embedding` or `output_layer`.
"""


def make_chunk(
    layout: ResolvedLayout,
    model_chunk: ModelChunk,
    transformer: TransformerConfig,
    groups: Groups,
    kernels: Kernels,
) -> Chunk:
    """Build one model chunk on the default device, without initialising its weights."""
    families: dict[str, type[Gpt] | type[EncoderDecoder]] = {"gpt": Gpt, "t5": EncoderDecoder}
    family = families[layout.model.kind]
    chunk: Chunk = family(layout, model_chunk, transformer, groups.megatron, kernels)
    if kernels.compiles_layers:
        _compile_layers(chunk)
    return chunk


def _compile_layers(chunk: Chunk) -> None:
    """Replace the forward pass of each layer by one that is compiled at its first call.

    Layers of equal shape share their code. Hooks of a layer run outside the compiled code, so
    parameters can be gathered and released as usual. Each new length of a sequence would be
    compiled again, which is why samples are generated without compiled code (Pipeline.logits).
    """
    for stack in chunk.stacks:
        for layer in getattr(chunk, stack.name).layers:
            layer.forward = torch.compile(layer.forward, dynamic=False, backend=COMPILER)


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
