"""Build the modules and parameter records of one rank. trainer/assemble.py calls `build_model`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from frontier_llm.device.kernels import Kernels
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.chunk import Chunk, make_chunk
from frontier_llm.model.initialise import initialise
from frontier_llm.model.parameter_records import parameter_records
from frontier_llm.model.transformer import transformer_config
from frontier_llm.parallel.groups import Groups
from frontier_llm.protocols import ParameterRecord


@dataclass(frozen=True)
class Model:
    """The part of the model that this rank holds."""

    chunks: list[Chunk]
    records: list[ParameterRecord]
    layout: ResolvedLayout
    transformer: TransformerConfig
    """megatron's configuration, which all chunks share."""
    is_compiled: bool = False
    """Whether torch.compile compiles the layers, or functions of them."""


def build_model(
    layout: ResolvedLayout,
    groups: Groups,
    device: torch.device,
    kernels: Kernels,
    seed: int,
) -> Model:
    """Build and initialise this rank's model chunks.

    Ranks do not communicate: each rank draws its own part of the initial weights.
    """
    transformer = transformer_config(layout, device, compiles_functions=kernels.compiles_functions)
    with device:
        chunks = [
            make_chunk(layout, model_chunk, transformer, groups, kernels)
            for model_chunk in layout.chunks_of_stage(groups.coordinates.pipeline)
        ]
    _share_table(chunks, layout)
    for chunk in chunks:
        chunk.to(device=device, dtype=transformer.params_dtype)
        chunk.train()
    records = parameter_records(chunks, layout, groups)
    initialise(records, layout.model, seed)
    is_compiled = kernels.compiles_layers or kernels.compiles_functions
    return Model(chunks, records, layout, transformer, is_compiled)


def _share_table(chunks: Sequence[Chunk], layout: ResolvedLayout) -> None:
    """Let the last model chunk read the table of the first one, if both are on this stage.

    A tied table is embedding and head. One chunk with both shares it by itself.
    """
    first, last = chunks[0], chunks[-1]
    has_both = first.model_chunk.has_embedding and last.model_chunk.has_head
    if layout.model.tied and has_both and first is not last:
        last.output_layer.weight = first.embedding.word_embeddings.weight
