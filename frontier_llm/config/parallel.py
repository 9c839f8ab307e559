"""The section `parallel`: how the model is split over tensor and pipeline ranks.

The number of data-parallel replicas is the number of ranks divided by tensor x pipeline.
"""

from pydantic import Field

from frontier_llm.config.section import Section


class ParallelConfig(Section):
    """Sizes of tensor and pipeline parallelism."""

    tensor: int = Field(ge=1)
    """Number of ranks over which each matrix is split. These ranks should be on one node."""
    pipeline: int = Field(ge=1)
    """Number of pipeline stages over which the layers are split."""
    chunks: int = Field(ge=1)
    """Model chunks per stage (interleaved 1F1B). More chunks shrink the pipeline bubble and send
    more messages."""
    sequence: bool
    """Sequence parallelism: also split norms and dropout along the sequence over the tensor
    ranks."""
    layers_per_stage: tuple[int, ...] | None = Field(strict=False)
    """Number of layers of each model chunk, in the order of the model: `pipeline x chunks` numbers.
    null = an even split. If it has a remainder, the chunks with the head and the embedding get
    fewer layers than the others."""
