"""Bytes of model states that a rank keeps from step to step, and of parameters it gathers."""

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

from frontier_llm.geometry.partition import Factors

FP32_BYTES = 4
SMALL_SHARE = 16
"""A unit is small if the average unit is at least this many times as large, as for a norm or a
table of positions. All small units together are then at most 1/16 of the stage's parameters."""
UnitT = TypeVar("UnitT", bound=Hashable)


def needs_master(compute_bytes: int, refresh_is_lossy: bool = False) -> bool:
    """Whether fp32 master weights are stored in addition to the parameters.

    A model that computes in fp32 needs none, because the interval that a rank updates lies inside
    its shard of the parameters; unless the refresh rounds what it sends
    (`message_memory.refresh_is_lossy`), so that this shard is not exact.
    """
    return compute_bytes != FP32_BYTES or refresh_is_lossy


def state_bytes(
    elements: int, factors: Factors, compute_bytes: int, master: bool
) -> dict[str, int]:
    """Return what one rank stores of a flat buffer, without temporarily gathered parameters.

    Args:
        elements: of the buffer, padding included.
        factors: over how many ranks each state is cut.
        compute_bytes: bytes per element of the parameters.
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
    """Return the size in elements up to which a unit does not count as one in flight.

    Args:
        units: number of units by the size of their buffers.
    """
    return sum(size * count for size, count in units.items()) // sum(units.values()) // SMALL_SHARE


def prefetch_window(
    uses: Iterable[tuple[UnitT, bool]], small: Container[UnitT], units_in_flight: int
) -> Iterator[tuple[UnitT, bool]]:
    """Yield the first use of each unit that should be gathered, or being gathered, at one moment.

    These are the next `units_in_flight` large units in the order of their use, and the small
    units between them. Missing units are gathered now. Units that were already used stay if they
    are in this window, which happens where a backward pass follows a forward pass and where one
    micro-batch follows another.

    Args:
        uses: pairs of a unit and whether a backward pass reads it; first the unit that is being
            read, if there is one, then the uses that will follow.
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


def gathered_elements(
    units: Mapping[int, int], units_in_flight: int, has_shared_table: bool
) -> int:
    """Return an upper bound on the gathered elements of a stage whose parameters are cut.

    All small units count. Of the large units there are: the one being read, `units_in_flight - 1`
    that are being gathered, and the previous one, whose pass has just ended or whose last gradient
    is not there yet.

    Args:
        units: number of units by the size of their buffers.
        units_in_flight: `sharding.units_in_flight`.
        has_shared_table: whether one table is both embedding and head, which stays gathered during
            the whole backward pass.
    """
    small, left, total = small_elements(units), units_in_flight + 1 + has_shared_table, 0
    for size in sorted(units, reverse=True):
        taken = units[size] if size <= small else min(units[size], left)
        total += taken * size
        left -= taken if size > small else 0
    return total
