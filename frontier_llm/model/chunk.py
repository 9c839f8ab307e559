"""Build the module of one model chunk, a range of consecutive layers of the model."""

from megatron.core.transformer.transformer_config import TransformerConfig

from frontier_llm.device.kernels import Kernels
from frontier_llm.geometry.model_chunks import ModelChunk
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.gpt import Gpt
from frontier_llm.model.t5 import EncoderDecoder
from frontier_llm.parallel.groups import Groups

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
    """Build one model chunk on the default device, without initialising its weights.

    Args:
        layout: how the whole model is divided over ranks.
        model_chunk: layers of the chunk.
        transformer: megatron's configuration.
        groups: coordinates and process groups of this rank.
        kernels: implementation of the norms.
    """
    model, megatron = layout.model, groups.megatron
    if model.kind == "t5":
        return EncoderDecoder(model, model_chunk, layout.recompute, transformer, megatron, kernels)
    return Gpt(model, model_chunk, layout.sequence_length, transformer, megatron, kernels)
