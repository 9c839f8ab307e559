"""From a configuration to the modules and records of one rank."""

from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from frontier_llm.config.run import RunConfig
from frontier_llm.device.kernels import Kernels
from frontier_llm.geometry.stages import Piece, make_pieces, pieces_of_stage
from frontier_llm.model.chunk import Chunk, make_chunk
from frontier_llm.model.initialise import initialise
from frontier_llm.model.parameters import parameter_records
from frontier_llm.model.transformer import transformer_config
from frontier_llm.parallel.groups import Groups
from frontier_llm.protocols import ParameterRecord


@dataclass(frozen=True)
class Model:
    """This rank's part of the model."""

    chunks: list[Chunk]
    records: list[ParameterRecord]
    pieces: tuple[Piece, ...]
    """Of the whole pipeline, in the model's order."""
    transformer: TransformerConfig
    """Shared by all chunks; the schedule reads its callbacks."""


def build_model(
    config: RunConfig,
    groups: Groups,
    precision: str,
    device: torch.device,
    kernels: Kernels,
) -> Model:
    """Build and initialise this rank's pieces of the model.

    Collective over all ranks only in that every rank must build its part.

    Args:
        config: the run.
        groups: where this rank stands.
        precision: resolved: `fp32`, `bf16` or `fp16`.
        device: where parameters live.
        kernels: implementation of the norms.
    """
    parallel, length = config.parallel, config.data.sequence_length
    pieces = make_pieces(
        config.model.layers, parallel.pipeline, parallel.chunks, parallel.layers_per_stage
    )
    transformer = transformer_config(config, pieces, precision, device)
    mine = pieces_of_stage(pieces, groups.at.pipeline)
    with device:
        chunks = [make_chunk(config, piece, transformer, groups, kernels) for piece in mine]
    for chunk in chunks:
        chunk.to(device=device, dtype=transformer.params_dtype)
        chunk.train()
    records = parameter_records(chunks, config.model, pieces, length, groups)
    initialise(records, config.model, config.trainer.seed)
    return Model(chunks, records, pieces, transformer)
