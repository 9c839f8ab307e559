"""The module of one model chunk, a GPT or an encoder-decoder."""

from megatron.core.transformer.transformer_config import TransformerConfig

from frontier_llm.device.kernels import Kernels
from frontier_llm.geometry.model_chunks import ModelChunk
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.gpt import Gpt
from frontier_llm.model.t5 import EncoderDecoder
from frontier_llm.parallel.groups import Groups

Chunk = Gpt | EncoderDecoder
"""The module of a model chunk. Both classes have the attributes `model_chunk` and `stacks`, and for
each stack (`encoder`, `decoder`) a submodule of that name with `layers` and `final_layernorm`. They
have `embedding` and `output_layer` if these belong to the chunk."""


def make_chunk(
    layout: ResolvedLayout,
    model_chunk: ModelChunk,
    transformer: TransformerConfig,
    groups: Groups,
    kernels: Kernels,
) -> Chunk:
    """Build one model chunk on the default device, without initialising its weights."""
    model, megatron = layout.model, groups.megatron
    if model.kind == "t5":
        return EncoderDecoder(model, model_chunk, layout.recompute, transformer, megatron, kernels)
    return Gpt(model, model_chunk, layout.sequence_length, transformer, megatron, kernels)
