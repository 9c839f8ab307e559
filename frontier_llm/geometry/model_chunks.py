"""The layers of each stage and virtual stage of the pipeline, and the stacks they form.

With C virtual stages per stage, the model is cut into S x C model chunks; chunk i lies on stage
i mod S as virtual stage i div S (interleaved 1F1B, Narayanan et al., SC'21, section 2.2).

A stack is a run of like layers: a GPT is one stack, the decoder. An encoder-decoder is one list of
layers, the encoder's first, which may be cut anywhere: a chunk holds layers of the encoder, of the
decoder, or of both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from frontier_llm.config.model import ModelConfig


@dataclass(frozen=True)
class ModelChunk:
    """The part of the model that one (stage, virtual stage) computes."""

    stage: int
    virtual_stage: int
    layers: range
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class Stack:
    """The layers of a stack that lie in one model chunk."""

    name: Literal["encoder", "decoder"]
    layers: range
    """At least one layer, numbered through the whole model."""
    ends: bool
    """Whether the stack's last layer is in this chunk, and with it the norm that follows."""

    @property
    def norm(self) -> str:
        """Name and unit of the norm behind the stack's last layer."""
        return "encoder_norm" if self.name == "encoder" else "final_norm"

    @property
    def positions(self) -> str:
        """Name of the table of relative positions; each chunk of the stack has a copy."""
        return f"{self.name}_positions"

    @property
    def positions_unit(self) -> str:
        """Unit of that table: the first layer's, because both are needed at the same time."""
        return f"layers.{self.layers[0]}"


def split_layers(layers: int, chunks: int) -> tuple[int, ...]:
    """Return the number of layers of each chunk, as even as possible.

    If the division has a remainder, the last and the first chunk get one layer less than others,
    because they also hold the head and the embedding.

    >>> split_layers(10, 4)
    (2, 3, 3, 2)
    """
    base, extra = divmod(layers, chunks)
    sizes = [base] * chunks
    # the last chunk gives up its extra layer first (the head costs most), then the first chunk
    order = [*range(1, chunks - 1), 0, chunks - 1] if chunks > 1 else [0]
    for chunk in order[:extra]:
        sizes[chunk] += 1
    return tuple(sizes)


@lru_cache
def make_model_chunks(
    layers: int,
    stages: int,
    virtual_stages: int = 1,
    layers_per_chunk: tuple[int, ...] | None = None,
) -> tuple[ModelChunk, ...]:
    """Cut a model over a pipeline.

    Args:
        layers: transformer layers in all.
        stages: pipeline ranks.
        virtual_stages: model chunks per stage.
        layers_per_chunk: layers of each of the `stages * virtual_stages` chunks in the model's
            order; None = as even as possible.

    Returns:
        The chunks in the model's order.
    """
    sizes = layers_per_chunk or split_layers(layers, stages * virtual_stages)
    chunks, first = [], 0
    for index, size in enumerate(sizes):
        virtual_stage, stage = divmod(index, stages)
        chunks.append(
            ModelChunk(
                stage,
                virtual_stage,
                range(first, first + size),
                has_embedding=index == 0,
                has_head=index == len(sizes) - 1,
            )
        )
        first += size
    return tuple(chunks)


def chunks_of_stage(chunks: Sequence[ModelChunk], stage: int) -> tuple[ModelChunk, ...]:
    """Return the model chunks of one stage, ordered by virtual stage."""
    return tuple(chunk for chunk in chunks if chunk.stage == stage)


def chunk_stacks(model: ModelConfig, chunk: ModelChunk) -> tuple[Stack, ...]:
    """Return the stacks of a model chunk, in the order of the forward pass."""
    start, stop, border = chunk.layers.start, chunk.layers.stop, model.encoder_layers
    encoder, decoder = range(start, min(stop, border)), range(max(start, border), stop)
    stacks = []
    if encoder:
        stacks.append(Stack("encoder", encoder, ends=encoder.stop == border))
    if decoder:
        stacks.append(Stack("decoder", decoder, ends=chunk.has_head))
    return tuple(stacks)


def has_shared_table(model: ModelConfig, chunks: Sequence[ModelChunk]) -> bool:
    """Whether a stage with these chunks uses one table as embedding and as head.

    Its gradient is complete only after the embedding's backward pass, the stage's last.
    """
    return model.tied and any(chunk.has_embedding and chunk.has_head for chunk in chunks)
