"""The module of one piece of the pipeline, of either family."""

from megatron.core.transformer.transformer_config import TransformerConfig

from frontier_llm.config.run import RunConfig
from frontier_llm.device.kernels import Kernels
from frontier_llm.geometry.stages import Piece
from frontier_llm.model.gpt import Gpt
from frontier_llm.model.t5 import EncoderDecoder
from frontier_llm.parallel.groups import Groups

Chunk = Gpt | EncoderDecoder
"""Both have `piece`, `stacks` and, by the names of these, modules with `layers` and
`final_layernorm`; `embedding` and `output_layer` where the piece has them."""


def make_chunk(
    config: RunConfig,
    piece: Piece,
    transformer: TransformerConfig,
    groups: Groups,
    kernels: Kernels,
) -> Chunk:
    """Build one piece on the default device, its weights not yet set."""
    model = config.model
    if model.kind == "t5":
        return EncoderDecoder(model, piece, config.recompute, transformer, groups.megatron, kernels)
    length = config.data.sequence_length
    return Gpt(model, piece, length, transformer, groups.megatron, kernels)
