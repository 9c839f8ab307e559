"""The order in which a pipeline stage computes: megatron-core's schedules as a list of passes.

Without a pipeline: for each micro-batch a forward pass, then a backward pass. 1F1B: forward passes
as warm-up, then pairs of one forward and one backward pass, then backward passes as cool-down
(Narayanan et al., SC'21, section 2.2.1). Interleaved 1F1B (section 2.2.2): warm-up, pairs and
cool-down as in 1F1B, but a stage has several model chunks. The micro-batches are processed in
groups of as many as there are stages: forward passes of a group go through the first chunk, then
through the second, and so on; backward passes go through the chunks in reverse.
"""

from typing import NamedTuple


class Pass(NamedTuple):
    """One model chunk computing one micro-batch."""

    forward: bool
    """True for a forward pass, False for a backward pass."""
    virtual_stage: int
    """Which model chunk of the stage."""


def stage_passes(stage: int, stages: int, virtual_stages: int, micro_batches: int) -> list[Pass]:
    """Return the passes of a stage in one step, in order.

    Args:
        stage: position on the pipeline axis.
        stages: pipeline ranks.
        virtual_stages: model chunks per stage.
        micro_batches: micro-batches of a replica per step; a multiple of `stages` if
            `virtual_stages` is more than 1.
    """
    total = micro_batches * virtual_stages
    if virtual_stages > 1:
        warm_up = min(2 * (stages - stage - 1) + (virtual_stages - 1) * stages, total)
    else:
        warm_up = min(stages - stage - 1, total)
    # model chunk of each forward pass of the step
    chunk_order = [k % (stages * virtual_stages) // stages for k in range(total)]
    forward = [Pass(True, virtual_stage) for virtual_stage in chunk_order]
    backward = [Pass(False, virtual_stages - 1 - virtual_stage) for virtual_stage in chunk_order]
    passes = forward[:warm_up]
    for pair in zip(forward[warm_up:], backward, strict=False):
        passes += pair
    return passes + backward[total - warm_up :]
