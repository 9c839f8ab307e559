"""List the passes of a pipeline stage in the order in which megatron-core's schedules run them.

A pass is the forward or backward computation of one micro-batch in one model chunk.

Without a pipeline, each micro-batch has a forward pass and then a backward pass.

In the 1F1B schedule, a stage starts with forward passes (warm-up). It continues with pairs of one
forward and one backward pass, and ends with backward passes (cool-down; Narayanan et al., SC'21,
section 2.2.1).

The interleaved 1F1B schedule (section 2.2.2) has the same three phases, but a stage has several
model chunks. Micro-batches are processed in groups, each with as many micro-batches as there are
stages. All forward passes of a group run on the first chunk of the stage, then on the second chunk,
and so on. Backward passes run on the chunks in reverse order.
"""

from typing import NamedTuple


class Pass(NamedTuple):
    """The forward or backward pass of one micro-batch in one model chunk."""

    forward: bool
    """True for a forward pass, False for a backward pass."""
    virtual_stage: int
    """Index of the model chunk on its stage."""


def stage_passes(stage: int, stages: int, virtual_stages: int, micro_batches: int) -> list[Pass]:
    """Return the passes of a stage in one step, in order.

    Args:
        stage: position on the pipeline axis.
        stages: number of pipeline stages.
        virtual_stages: model chunks per stage.
        micro_batches: micro-batches per replica and step; a multiple of `stages` if
            `virtual_stages` is more than 1.
    """
    total = micro_batches * virtual_stages
    if virtual_stages > 1:
        warm_up = min(2 * (stages - stage - 1) + (virtual_stages - 1) * stages, total)
    else:
        warm_up = min(stages - stage - 1, total)
    # the virtual stage of each forward pass of the step
    group_passes = stages * virtual_stages  # forward passes of one group of micro-batches
    chunk_order = [index % group_passes // stages for index in range(total)]
    forward = [Pass(True, virtual_stage) for virtual_stage in chunk_order]
    backward = [Pass(False, virtual_stages - 1 - virtual_stage) for virtual_stage in chunk_order]
    passes = forward[:warm_up]
    for pair in zip(forward[warm_up:], backward, strict=False):
        passes += pair
    return passes + backward[total - warm_up :]
