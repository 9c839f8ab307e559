"""Count the bytes of model states that a rank keeps between steps, and of gathered parameters.

A unit is the parameters that are gathered together: the embedding, a layer or the head.
"""

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

from frontier_llm.geometry.partition import Factors

COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per parameter and per activation, by compute format."""
FP32_BYTES = 4
MOMENT_BLOCK_ELEMENTS = 256
"""Elements per scale of moments in 8 bits (collectives/block_codes.py)."""
MOMENT_BLOCK_WORDS = {"bf16": 128, "int8": 65}
"""Words of 4 bytes per block of reduced moments in a checkpoint (checkpoint/reduced_moments.py)."""
SMALL_SHARE = 16
"""A unit is small if the average unit is at least this many times as large. Norms and position
tables are small. All small units of a stage together have at most 1/16 of its parameters."""
UnitT = TypeVar("UnitT", bound=Hashable)


def needs_master(compute_bytes: int, refresh_is_lossy: bool = False) -> bool:
    """Whether fp32 master weights are stored in addition to the parameters.

    A model that computes in fp32 usually needs no master weights, because the interval that a rank
    updates is part of its shard of the fp32 parameters. It needs them if the refresh (the gather of
    updated parameters) rounds the parameters (`message_memory.refresh_is_lossy`).
    """
    return compute_bytes != FP32_BYTES or refresh_is_lossy


def state_bytes(
    elements: int, factors: Factors, compute_bytes: int, master: bool
) -> dict[str, int]:
    """Return the bytes that one rank keeps of a flat buffer, without gathered parameters.

    Args:
        elements: number of elements of the buffer, padding included.
        factors: sharding factors.
        compute_bytes: bytes per element of the parameters.
        master: whether master weights are stored (`needs_master`).

    Returns:
        The bytes of `parameters`, `gradients` (fp32 sums), `master` and `moments` (two per
        element).
    """
    optimizer_elements = elements // factors.optimizer
    return {
        "parameters": compute_bytes * (elements // factors.params),
        "gradients": FP32_BYTES * (elements // factors.grads),
        "master": FP32_BYTES * optimizer_elements if master else 0,
        "moments": 2 * FP32_BYTES * optimizer_elements,
    }


def small_elements(units: Mapping[int, int]) -> int:
    """Return the number of elements up to which a unit is small (see `SMALL_SHARE`).

    Args:
        units: number of units by the size of their buffers.
    """
    total = sum(size * count for size, count in units.items())
    return total // sum(units.values()) // SMALL_SHARE


def prefetch_window(
    uses: Iterable[tuple[UnitT, bool]], small: Container[UnitT], units_in_flight: int
) -> Iterator[tuple[UnitT, bool]]:
    """Yield the units that should be gathered, or be arriving, at one moment of a step.

    This window contains the next `units_in_flight` large units in the order of their use, and the
    small units between them. The engine gathers missing units of the window. Units that were
    already used stay gathered if the window contains them again. This happens where a backward pass
    follows a forward pass, and where one micro-batch follows another.

    Args:
        uses: pairs of a unit and whether a backward pass reads it. The first pair is the unit that
            is being read, if there is one. The other pairs are the uses that follow.
        small: small units (`small_elements`), which do not count towards `units_in_flight`.
        units_in_flight: `sharding.units_in_flight`.

    Yields:
        The first use of each unit in the window.
    """
    seen, remaining = set[UnitT](), units_in_flight
    for use in uses:
        unit, _ = use
        if unit in seen:
            continue
        if unit not in small:
            if not remaining:
                return
            remaining -= 1
        seen.add(unit)
        yield use


def gathered_elements(
    units: Mapping[int, int], units_in_flight: int, has_shared_table: bool
) -> int:
    """Return an upper bound on the gathered elements of a stage whose parameters are sharded.

    All small units count. At most `units_in_flight + 1` large units are gathered at the same time:
    the unit that is read, `units_in_flight - 1` units that are arriving, and the previous unit,
    whose pass has just ended or whose last gradient is still being computed.

    Args:
        units: number of units by the size of their buffers.
        units_in_flight: `sharding.units_in_flight`.
        has_shared_table: whether one table is both embedding and head. This table stays gathered
            during the whole backward pass.
    """
    small_limit, total = small_elements(units), 0
    remaining = units_in_flight + 1 + has_shared_table  # large units that may still count
    for size in sorted(units, reverse=True):
        is_small = size <= small_limit
        counted = units[size] if is_small else min(units[size], remaining)
        total += counted * size
        remaining -= 0 if is_small else counted
    return total
