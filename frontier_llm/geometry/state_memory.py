"""Bytes of model states that a rank keeps from step to step, by category."""

from frontier_llm.geometry.partition import Factors

FP32_BYTES = 4


def needs_master(compute_bytes: int, rounds_refresh: bool = False) -> bool:
    """Whether master weights are stored beside the parameters.

    Not where the model computes in fp32: the interval that a rank updates lies inside its shard
    of the parameters. That shard is not exact where the refresh rounds what it sends
    (`rounds_refresh` of message_memory.py).
    """
    return compute_bytes != FP32_BYTES or rounds_refresh


def state_bytes(
    elements: int, factors: Factors, compute_bytes: int, master: bool
) -> dict[str, int]:
    """Return what one rank stores of a flat buffer, without what is gathered for a while.

    Args:
        elements: of the buffer, padding included.
        factors: over how many ranks each state is cut.
        compute_bytes: of an element of the parameters.
        master: whether master weights are stored (`needs_master`).

    Returns:
        Bytes of `parameters`, `gradients` (the fp32 accumulator), `master` and `moments` (two).
    """
    of_optimizer = elements // factors.optimizer
    return {
        "parameters": compute_bytes * (elements // factors.params),
        "gradients": FP32_BYTES * (elements // factors.grads),
        "master": FP32_BYTES * of_optimizer if master else 0,
        "moments": 2 * FP32_BYTES * of_optimizer,
    }
