"""What checkpoints cost a step on average."""

from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.memory import MASTER_AND_MOMENTS_BYTES


def checkpoint_stall_seconds(candidate: Candidate, step_seconds: float) -> float:
    """Return the seconds a step waits for checkpoints, over the steps between two of them.

    A node writes the intervals of its ranks to the last of the cluster's storages. `blocking`
    waits for all of it; `lazy` for what has not been written when the next checkpoint is due.
    Zero where the cluster names no storage.

    Args:
        candidate: the layout.
        step_seconds: of a step without checkpoints.
    """
    config = candidate.config
    checkpoint, storage = config.checkpoint, config.cluster.storage
    if checkpoint.mode == "off" or not storage:
        return 0.0
    fullest = max(kind.elements for kind in candidate.model.kinds)
    writers = min(candidate.grid.ranks_per_node, candidate.grid.size)
    of_rank = MASTER_AND_MOMENTS_BYTES * fullest / candidate.factors.optimizer
    writing = writers * of_rank / (storage[-1].write_gb_per_second * 1e9)
    steps = checkpoint.every_steps
    hidden = steps * step_seconds if checkpoint.mode == "lazy" else 0.0
    return max(0.0, writing - hidden) / steps
