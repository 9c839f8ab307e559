"""Bytes of model states that a rank keeps from step to step, and what it gathers for a while."""

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

from frontier_llm.geometry.partition import Factors

FP32_BYTES = 4
SMALL_SHARE = 16
"""A unit is small if the average one is so many times as large: a norm, or a table of positions.
All small ones together are then at most this share of the stage's parameters."""
UnitT = TypeVar("UnitT", bound=Hashable)


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


def small_elements(units: Mapping[int, int]) -> int:
    """Return the elements up to which a unit does not count as one in flight.

    Args:
        units: how many there are, by the size of their buffers.
    """
    return sum(size * count for size, count in units.items()) // sum(units.values()) // SMALL_SHARE


def in_flight(
    uses: Iterable[tuple[UnitT, bool]], small: Container[UnitT], units_in_flight: int
) -> Iterator[tuple[UnitT, bool]]:
    """Yield the first use of each unit that is to be whole, or on its way, at one moment.

    So many large ones, in the order in which they are used, and the small ones between them. What
    is not yet there is gathered, and what has been used is kept where it is among them: at the
    turns from forward to backward and from one micro-batch to the next.

    Args:
        uses: a unit each, and whether a backward pass reads it: first the one that is being read,
            if there is one, then those that will follow.
        small: units that do not count (`small_elements`).
        units_in_flight: `sharding.units_in_flight`.
    """
    met, left = set[UnitT](), units_in_flight
    for use in uses:
        unit, _ = use
        if unit in met:
            continue
        if unit not in small:
            if not left:
                return
            left -= 1
        met.add(unit)
        yield use


def gathered_elements(units: Mapping[int, int], units_in_flight: int, keeps_head: bool) -> int:
    """Bound the elements of units that are whole at once where parameters are cut.

    All small ones, and of the large ones: the one that is read, `units_in_flight - 1` that are on
    their way, and the one before, whose pass has just ended or whose last gradient is to come.

    Args:
        units: how many there are, by the size of their buffers.
        units_in_flight: `sharding.units_in_flight`.
        keeps_head: whether a table that is both embedding and head stays for the whole backward
            pass.
    """
    small, left, total = small_elements(units), units_in_flight + 1 + keeps_head, 0
    for size in sorted(units, reverse=True):
        taken = units[size] if size <= small else min(units[size], left)
        total += taken * size
        left -= taken if size > small else 0
    return total
