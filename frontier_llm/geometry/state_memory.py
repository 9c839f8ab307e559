"""Count the bytes that a rank keeps between steps, of gathered parameters, and of messages.

A unit is the parameters that are gathered together: the embedding, a layer or the head.
"""

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from frontier_llm.config.collectives import CollectivesConfig
from frontier_llm.config.optimizer import OptimizerConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.flat_layout import FlatLayout, UnitRuns
from frontier_llm.geometry.formats import Feedback, Format, StateFormats
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.partition import Cut, Factors, Interval
from frontier_llm.units import MIB

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
BUFFER_BYTES = 64
"""Buffer sizes are multiples of this many bytes (collectives/slots.py)."""
SIMILAR_SIZES = 0.8
"""Units share buffers if the smaller one has at least this share of the larger one's elements. The
pool shares buffers that differ a little more, because messages also contain scales."""
LOSS_CHUNK_BYTES = 128 * MIB
"""Size of the fp32 logits that the loss computes at a time on a GPU: enough to fill it."""
CPU_LOSS_CHUNK_BYTES = 2**19
"""The same on a CPU: small enough for its caches."""
QUERY_BLOCK, CPU_QUERY_BLOCK = 1024, 128
"""Queries that attention with a mask computes at a time on a GPU, which fewer would not keep busy,
and on a CPU."""


def needs_master(compute_bytes: int, refresh_is_lossy: bool = False) -> bool:
    """Whether fp32 master weights are stored in addition to the parameters.

    A model that computes in fp32 usually needs no master weights, because the interval that a rank
    updates is part of its shard of the fp32 parameters. It needs them if the refresh (the gather of
    updated parameters) rounds the parameters (`refresh_is_lossy`).
    """
    return compute_bytes != FP32_BYTES or refresh_is_lossy


def small_elements(units: Mapping[int, int]) -> int:
    """Return the number of elements up to which a unit is small (see `SMALL_SHARE`).

    `units` has the number of units by the size of their buffers.
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

    `uses` are pairs of a unit and whether a backward pass reads it, first the one that is being
    read, if there is one. The first use of each unit in the window is yielded.
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
    whose pass has just ended or whose last gradient is still being computed. A table that is both
    embedding and head stays gathered during the whole backward pass.
    """
    small_limit, total = small_elements(units), 0
    remaining = units_in_flight + 1 + has_shared_table  # large units that may still count
    for size in sorted(units, reverse=True):
        is_small = size <= small_limit
        counted = units[size] if is_small else min(units[size], remaining)
        total += counted * size
        remaining -= 0 if is_small else counted
    return total


def updates_whole_matrices(config: OptimizerConfig) -> bool:
    """Whether the optimizer updates the matrices of layers as a whole."""
    return config.name == "muon"


def check_whole_matrices(config: RunConfig, factors: Factors, formats: StateFormats) -> None:
    """Refuse encoded messages where the intervals of a unit differ in length (`partition.Cut`).

    Raises:
        ConfigError: the optimizer updates whole matrices, its states are divided over several
            ranks, and messages are sent in integers or parameters in fewer bits than they have.
    """
    if not updates_whole_matrices(config.optimizer) or factors.optimizer == 1:
        return
    compute_bytes = COMPUTE_BYTES["fp32" if config.precision.name == "fp32" else "bf16"]
    sums = replace(formats, sums=StateFormats().sums)  # not sent if there is one replica
    if (formats if factors.data > factors.optimizer else sums).any_encoded(compute_bytes):
        raise ConfigError(
            "collectives",
            f"{config.collectives.name}, with optimizer.name={config.optimizer.name}",
            "messages that are not encoded, because the optimizer keeps matrices whole and its "
            f"states are divided over {factors.optimizer} ranks",
            "set collectives=plain, collectives.grads_format=bf16 if you like; or "
            "sharding=replicated, or optimizer=adamw",
        )


def moment_bytes(config: OptimizerConfig, layout: FlatLayout, interval: Interval) -> int:
    """Return the bytes of all optimizer states of an interval but the master weights.

    AdamW keeps two fp32 moments per element, or two codes per element and two scales per block.
    Muon keeps one fp32 momentum per element of the matrices that it updates, and uses AdamW for all
    other elements. Adafactor keeps sums over the rows and columns of matrices, on each rank those
    of the whole unit, second moments of norms and biases, and momentum only if beta1 is not 0.
    """
    if config.name == "adamw_8bit":
        blocks = -(-interval.length // MOMENT_BLOCK_ELEMENTS)
        return 2 * blocks * (MOMENT_BLOCK_ELEMENTS + FP32_BYTES)
    if config.name == "adafactor":
        vectors = interval.length - max(0, min(layout.decayed, interval.stop) - interval.start)
        momentum = interval.length if config.beta1 else 0
        return FP32_BYTES * (momentum + vectors + layout.factored)
    whole = max(0, min(layout.whole, interval.stop) - interval.start)
    return FP32_BYTES * (2 * interval.length - whole)


def rank_state_bytes(
    config: OptimizerConfig,
    units: UnitRuns,
    factors: Factors,
    compute_bytes: int,
    data_rank: int | None,
    *,
    master: bool,
) -> dict[str, int]:
    """Return the bytes that one rank keeps of its units, without gathered parameters.

    They are the bytes of `parameters`, `gradients` (fp32 sums), `master` (if `needs_master`) and
    `moments` (all other states of the optimizer). Without a data rank, the fullest one counts.
    """
    rank = _fullest(units, factors) if data_rank is None else data_rank
    params = grads = masters = moments = 0
    for layout, count in units:
        cut = Cut(factors, layout.size, layout.bounds)
        own = cut.interval(rank, factors.optimizer)
        params += count * cut.interval(rank, factors.params).length
        grads += count * cut.interval(rank, factors.grads).length
        masters += count * own.length if master else 0
        moments += count * moment_bytes(config, layout, own)
    return {
        "parameters": compute_bytes * params,
        "gradients": FP32_BYTES * grads,
        "master": FP32_BYTES * masters,
        "moments": moments,
    }


def saved_bytes(
    config: OptimizerConfig, units: UnitRuns, factors: Factors, data_rank: int | None
) -> int:
    """Return the bytes of all optimizer states of a rank: fp32 master weights and moments."""
    if config.name == "adamw_8bit":  # checkpoints store decoded moments
        config = config.model_copy(update={"name": "adamw"})
    states = rank_state_bytes(config, units, factors, 0, data_rank, master=True)
    return states["master"] + states["moments"]


def _fullest(units: UnitRuns, factors: Factors) -> int:
    """Return the data rank with the most elements of optimizer states."""
    divided = [layout.bounds for layout, count in units if layout.bounds for _ in range(count)]
    if not divided:
        return 0
    loads = [
        sum(bounds[index + 1] - bounds[index] for bounds in divided)
        for index in range(factors.optimizer)
    ]
    fullest = loads.index(max(loads))
    ranks = range(factors.optimizer)
    return next(
        rank for rank in ranks if factors.interval(len(ranks), rank, len(ranks)).start == fullest
    )


def refresh_is_lossy(formats: StateFormats, factors: Factors, compute_bytes: int) -> bool:
    """Whether the refresh after an update rounds the parameters that it sends."""
    return factors.optimizer > factors.params and not formats.refresh.is_lossless(compute_bytes)


def feedback_bytes(config: CollectivesConfig, grid: Grid, factors: Factors, elements: int) -> int:
    """Return the bytes of the rounding errors that a rank keeps for the gradients of a unit.

    `elements` is the size of the flat buffer of the unit, padding included.
    """
    feedback = Feedback.of(config)
    if feedback is None:
        return 0
    formats, total = StateFormats.at(config), 0
    ranks = grid.data_group(0)
    for hop in factors.collective_hops:
        crosses = not grid.same_node(ranks[0], ranks[hop.group(0)[-1]])
        of_hop = formats.sums if hop.digit == "replica" else formats.grads
        if crosses and of_hop.network.is_quantised:
            total += feedback.stored_bytes(hop.width, elements // hop.high)
    return total


def message_bytes(
    formats: StateFormats,
    factors: Factors,
    units: UnitRuns,
    compute_bytes: int,
    units_in_flight: int,
    written: int,
) -> int:
    """Return an upper bound on the bytes of the buffers for encoded messages on a rank.

    Units of similar sizes share buffers, which are as large as the largest of them needs. Each
    buffer counts as many times as the number of collectives that may use such a buffer at the same
    time. At most `written` units have a buffer with gradients that are not encoded yet.
    """
    similar: list[list[tuple[FlatLayout, int]]] = []
    for layout, count in sorted(units, key=lambda unit: unit[0].size, reverse=True):
        if similar and layout.size >= SIMILAR_SIZES * similar[-1][0][0].size:
            similar[-1].append((layout, count))
        else:
            similar.append([(layout, count)])
    # every reduction under way is in another of its collectives
    sums = min(len(factors.collective_hops), units_in_flight + 1)
    at_once = {"gather": units_in_flight, "refresh": 2 * units_in_flight, "sum": sums}
    at_once |= {"written": written, "hop": 1}
    total = 0
    for group in similar:
        size, number = group[0][0].size, sum(count for _, count in group)
        decayed = size - max(unit.size - unit.decayed for unit, _ in group)
        for rounded, limit in _rounded_buffers(formats, factors, size, decayed, compute_bytes):
            total += rounded * min(number, at_once[limit])
    return total


@lru_cache(maxsize=2**14)  # a search asks for the same unit in many stages
def _rounded_buffers(
    formats: StateFormats, factors: Factors, size: int, decayed: int, compute_bytes: int
) -> tuple[tuple[int, str], ...]:
    """Return what `_buffers` yields, in multiples of BUFFER_BYTES."""
    return tuple(
        (-(-buffer_bytes // BUFFER_BYTES) * BUFFER_BYTES, limit)
        for buffer_bytes, limit in _buffers(formats, factors, size, decayed, compute_bytes)
    )


def _buffers(
    formats: StateFormats, factors: Factors, size: int, decayed: int, compute_bytes: int
) -> Iterator[tuple[int, str]]:
    """Yield the bytes of each buffer of one unit, and the limit on the number of such buffers.

    The limits are those of `message_bytes`. The bytes are those on the rank with the last interval
    of the unit. Its messages are the longest, because norms and biases, which are sent in 16 bits,
    lie at the end of the buffer. `size` is the number of elements of the buffer. Its first
    `decayed` elements belong to matrices (`FlatLayout.decayed`), and only these may be quantised.
    """
    p, g, o = factors.params, factors.grads, factors.optimizer

    def slots(message_format: Format, parts: int, intervals: int) -> int:
        """Return the bytes of a collective over the last of equal intervals: a slot per part."""
        length = size // intervals
        border = max(0, decayed - (size - length))
        return parts * message_format.slot_bytes(length // parts, parts, border)

    gathered = {
        slots(message_format, p, 1)
        for message_format in (formats.params, formats.params_backward)
        if p > 1 and not message_format.is_lossless(compute_bytes)
    }
    yield from ((buffer_bytes, "gather") for buffer_bytes in gathered)
    if o > p and not formats.refresh.is_lossless(compute_bytes):
        yield slots(formats.refresh, o // p, p), "refresh"
    if g > 1 and any(grads_format.is_quantised for grads_format in formats.grads):
        yield size * compute_bytes, "written"  # gradients of a micro-batch, freed when encoded
    for hop in factors.collective_hops:
        of_hop = formats.sums if hop.digit == "replica" else formats.grads
        exchanged = [
            slots(message_format, hop.width, hop.low)
            for message_format in set(of_hop)
            if message_format.is_quantised
        ]
        if exchanged:
            yield from [(max(exchanged), "hop")] * 2  # sent and received slots
            yield size // hop.high * FP32_BYTES, "sum"  # the fp32 sum
    replicas = factors.width("replica")
    if factors.divides_sums and replicas > 1:
        gathered_sums = [
            slots(message_format, replicas, o)
            for message_format in set(formats.sums)
            if not message_format.is_lossless(FP32_BYTES)
        ]
        yield max(gathered_sums, default=0), "sum"
