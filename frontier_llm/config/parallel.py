"""How the model is split over ranks. The remaining factor is data parallelism."""

from pydantic import Field

from frontier_llm.config.section import Section


class ParallelConfig(Section):
    """Sizes of tensor and pipeline parallelism."""

    tensor: int = Field(ge=1)
    """Ranks over which each matrix is split. They should be on one node."""
    pipeline: int = Field(ge=1)
    """Pipeline stages: ranks over which the layers are split."""
    chunks: int = Field(ge=1)
    """Model chunks per stage (interleaved 1F1B). More chunks shrink the pipeline bubble and send
    more messages."""
    sequence: bool
    """Sequence parallelism: also split norms and dropout along the sequence over the tensor
    ranks."""
    layers_per_stage: tuple[int, ...] | None = Field(strict=False)
    """Layers of each model chunk, in the order of the model: `pipeline x chunks` numbers. null =
    an even split, in which the chunks with the embedding and the head get fewer layers."""
