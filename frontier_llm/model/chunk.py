"""Build the module of one model chunk, a range of consecutive layers of the model."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from frontier_llm.device.kernels import Kernels
from frontier_llm.geometry.model_chunks import ModelChunk
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.gpt import Gpt
from frontier_llm.model.t5 import EncoderDecoder
from frontier_llm.parallel.groups import Groups

COMPILER = "inductor"
"""Backend of torch.compile."""
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
