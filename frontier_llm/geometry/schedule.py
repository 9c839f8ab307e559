"""The order in which a pipeline stage computes: megatron-core's schedules as a list.

No pipeline: each micro-batch forward, then backward. 1F1B: a warm-up of forward passes, pairs of
one forward and one backward, a cool-down (Narayanan et al., SC'21, section 2.2.1). Interleaved:
the same over virtual micro-batches, in groups of as many micro-batches as there are stages, chunk
by chunk (section 2.2.2).
"""

from typing import NamedTuple


class Pass(NamedTuple):
    """One piece of the model computing one micro-batch."""

    forward: bool
    """Or backward."""
    chunk: int
    """Which piece of the stage."""


def stage_passes(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Pass]:
    """Return a stage's passes of one step, in order.

    Args:
        stage: whose.
        stages: pipeline ranks.
        chunks: pieces a stage.
        micro_batches: of a replica in a step; with several chunks a multiple of `stages`.
    """
    total = micro_batches * chunks
    if chunks > 1:
        warm_up = min(2 * (stages - stage - 1) + (chunks - 1) * stages, total)
    else:
        warm_up = min(stages - stage - 1, total)
    forward = [Pass(True, _chunk(k, stages, chunks)) for k in range(total)]
    backward = [Pass(False, chunks - 1 - _chunk(k, stages, chunks)) for k in range(total)]
    passes = forward[:warm_up]
    for pair in zip(forward[warm_up:], backward, strict=False):
        passes += pair
    return passes + backward[total - warm_up :]


def _chunk(virtual_micro_batch: int, stages: int, chunks: int) -> int:
    return virtual_micro_batch % (stages * chunks) // stages
