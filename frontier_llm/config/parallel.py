"""The section `parallel`: how the model and the tokens of a sample are split over ranks.

The number of data ranks is the number of ranks divided by tensor x pipeline. `context` data ranks
are one replica, which reads samples of its own.
"""

from typing import Annotated, Literal

from pydantic import Field

from frontier_llm.config.section import Section

ScheduleName = Literal["1f1b", "interleaved", "zb_h1", "zb_v", "v_half"]


class ParallelConfig(Section):
    """Sizes of tensor, pipeline and context parallelism."""

    tensor: int = Field(ge=1)
    """Number of ranks over which each matrix is split. These ranks should be on one node."""
    pipeline: int = Field(ge=1)
    """Number of pipeline stages over which the layers are split. Default: 1 on GPUs; on a
    CPU 2, if the ranks divide into them."""
    chunks: int = Field(ge=1)
    """Model chunks per stage (interleaved 1F1B). More chunks shrink the pipeline bubble and send
    more messages."""
    schedule: Literal["auto"] | ScheduleName = "auto"
    """Order of the forward and backward passes of a pipeline. `1f1b` and `zb_h1` (zero bubble) have
    one model chunk per stage, `interleaved` two or more, `zb_v` and `v_half` two, where the first
    stage has the first and the last chunk. `auto` chooses the fastest that fits in memory."""
    waiting_weights: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """How many weight gradients of a stage, each of one micro-batch in one model chunk, may wait
    until the stage has nothing else to compute. 0 = `1f1b` and `interleaved` do not split backward
    passes, and the other schedules have no such limit. However many may wait, no stage holds more
    micro-batches than the fullest stage without waiting. `auto` chooses the fastest that fits in
    memory."""
    sequence: bool
    """Sequence parallelism: also split norms and dropout along the sequence over the tensor
    ranks."""
    layers_per_stage: Literal["auto"] | Annotated[tuple[int, ...], Field(strict=False)] | None
    """Number of layers of each model chunk, in the order of the model: `pipeline x chunks` numbers.
    The first chunk and the last, with the embedding and the head, may have none. null = an even
    split. If it has a remainder, the chunks with the head and the embedding get fewer layers than
    the others. `auto` balances the seconds of the stages if a step then fits in memory and takes 1%
    less, or 10% if all layers are alike, or else splits evenly. A run that resumes keeps its
    numbers."""
    context: Literal["auto"] | Annotated[int, Field(ge=1)] = 1
    """Number of data ranks that divide the tokens of each sample of a GPT. `auto` chooses the
    fastest that fits in memory."""

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks that read the same samples."""
        return self.tensor * self.pipeline * self.context_ranks

    @property
    def context_ranks(self) -> int:
        """`context` as a number, which is 1 until the planner has replaced `auto`."""
        return 1 if self.context == "auto" else self.context
