"""Divide the layers of a model over the stages and virtual stages of a pipeline.

With S stages and C virtual stages per stage, the model is divided into S x C model chunks, whose
stages follow from the placement (pipeline_schedule.py).

A stack is a sequence of layers of one kind. A GPT has one stack, the decoder. The layers of an
encoder-decoder form one list, in which the encoder comes first, and which may be divided anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.lengths import SampleLengths
from frontier_llm.geometry.pipeline_schedule import Placement


@dataclass(frozen=True)
class ModelChunk:
    """The part of the model that one virtual stage of a stage computes."""

    stage: int
    virtual_stage: int
    layers: range
    """Indices of the layers in the model."""
    has_embedding: bool
    """Whether it is the first chunk, with the embedding of all tokens or of the encoder's."""
    has_head: bool


@dataclass(frozen=True)
class Stack:
    """The layers of a stack that belong to one model chunk."""

    name: Literal["encoder", "decoder"]
    layers: range
    """Indices of the layers in the model; none if a last chunk has only the final norm and head."""
    ends: bool
    """Whether the chunk has the last layer of the stack and the norm that follows it."""

    @property
    def norm_unit(self) -> str:
        """Name of the norm after the last layer of the stack, and of the unit of this norm."""
        return "encoder_norm" if self.name == "encoder" else "final_norm"

    @property
    def positions(self) -> str:
        """Name of the relative position table. Each chunk with layers of the stack has a copy."""
        return f"{self.name}_positions"

    @property
    def positions_unit(self) -> str:
        """Unit of the relative position table: that of the first layer, which reads the table."""
        return f"layers.{self.layers[0]}"


def split_layers(layers: int, chunks: int) -> tuple[int, ...]:
    """Return the number of layers of each chunk, as even as possible.

    >>> split_layers(10, 4)
    (2, 3, 3, 2)
    """
    base, extra = divmod(layers, chunks)
    sizes = [base] * chunks
    # The last chunk is the last to get an extra layer, because the head costs the most. The first
    # chunk, with the embedding, comes before it.
    order = [*range(1, chunks - 1), 0, chunks - 1] if chunks > 1 else [0]
    for chunk in order[:extra]:
        sizes[chunk] += 1
    return tuple(sizes)


@lru_cache
def make_model_chunks(
    layers: int, placement: Placement, layers_per_chunk: tuple[int, ...] | None = None
) -> tuple[ModelChunk, ...]:
    """Divide the layers of a model over a pipeline, in the order of the forward pass.

    `layers_per_chunk` are the numbers of layers of the chunks; None = as even as possible.
    """
    sizes = layers_per_chunk or split_layers(layers, placement.chunks)
    chunks, first = [], 0
    for index, size in enumerate(sizes):
        chunks.append(
            ModelChunk(
                placement.stage(index),
                placement.virtual_stage(index),
                range(first, first + size),
                has_embedding=index == 0,
                has_head=index == len(sizes) - 1,
            )
        )
        first += size
    return tuple(chunks)


def chunk_stacks(model: ModelConfig, chunk: ModelChunk) -> tuple[Stack, ...]:
    """Return the stacks of a model chunk, in the order of the forward pass."""
    start, stop, border = chunk.layers.start, chunk.layers.stop, model.encoder_layers
    encoder, decoder = range(start, min(stop, border)), range(max(start, border), stop)
    stacks = []
    if encoder:
        stacks.append(Stack("encoder", encoder, ends=encoder.stop == border))
    if decoder or chunk.has_head:
        stacks.append(Stack("decoder", decoder, ends=chunk.has_head))
    return tuple(stacks)


def chunk_tables(model: ModelConfig, chunk: ModelChunk) -> tuple[str, ...]:
    """Return the units of the embeddings that a chunk looks up, in the order of the forward pass.

    If the encoder has an embedding of its own, that of the decoder is where the decoder begins.
    """
    if not model.encoder_embedding:
        return ("embedding",) * chunk.has_embedding
    begins = model.encoder_layers in chunk.layers
    return ("encoder_embedding",) * chunk.has_embedding + ("embedding",) * begins


def looked_up_elements(model: ModelConfig, chunk: ModelChunk, lengths: SampleLengths) -> int:
    """Count the elements of the embeddings of a sample's tokens that a chunk looks up."""
    tables = chunk_tables(model, chunk)
    tokens = lengths.decoder if model.encoder_embedding else lengths.total
    of_encoder = lengths.encoder * model.encoder.hidden * ("encoder_embedding" in tables)
    return of_encoder + tokens * model.hidden * ("embedding" in tables)


def received_elements(
    model: ModelConfig, chunk: ModelChunk, lengths: SampleLengths
) -> tuple[int, int]:
    """Count the elements of encoder and decoder per sample that a chunk gets from the previous one.

    Before the chunk with its embedding, there are none of the decoder. The first chunk gets none.
    """
    is_embedded = not model.encoder_embedding or chunk.layers.start > model.encoder_layers
    decoder = lengths.decoder * model.hidden * is_embedded
    return lengths.encoder * model.encoder.hidden, decoder


def has_shared_table(model: ModelConfig, chunks: Sequence[ModelChunk]) -> bool:
    """Whether one table is both embedding and head of one of these chunks.

    The gradient of this table is complete only after the backward pass of the embedding, which is
    the last of the chunk.
    """
    return model.tied and any(
        chunk.has_head and "embedding" in chunk_tables(model, chunk) for chunk in chunks
    )
