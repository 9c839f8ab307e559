"""How the model is cut over ranks; data parallelism is what remains."""

from pydantic import Field

from frontier_llm.config.section import Section


class ParallelConfig(Section):
    """Sizes of the tensor and pipeline axes."""

    tensor: int = Field(ge=1)
    """Ranks over which each matrix is cut. Keep it within one node."""
    pipeline: int = Field(ge=1)
    """Stages: ranks over which the layers are cut."""
    chunks: int = Field(ge=1)
    """Pieces of the model on each stage (interleaved 1F1B): more shrink the bubble, send more."""
    sequence: bool
    """Also cut norms and dropout along the sequence, over the tensor ranks (sequence parallel)."""
    layers_per_stage: tuple[int, ...] | None = Field(strict=False)
    """Layers of each piece in the model's order, `pipeline x chunks` numbers; null = as even as
    they can be, with fewer on the pieces that also hold the embedding and the head."""
