"""Count the bytes of model states that a rank keeps between steps, for each optimizer."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from frontier_llm.config.optimizer import OptimizerConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.cut import Cut
from frontier_llm.geometry.flat_layout import FlatLayout
from frontier_llm.geometry.formats import StateFormats
from frontier_llm.geometry.partition import Factors, Interval
from frontier_llm.geometry.state_memory import COMPUTE_BYTES, FP32_BYTES, MOMENT_BLOCK_ELEMENTS


def updates_whole_matrices(config: OptimizerConfig) -> bool:
    """Whether the optimizer updates the matrices of layers as a whole."""
    return config.name == "muon"


def check_whole_matrices(config: RunConfig, factors: Factors, formats: StateFormats) -> None:
    """Refuse encoded messages where the intervals of a unit differ in length (geometry/cut.py).

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

    Args:
        config: the optimizer.
        layout: layout of the unit's buffer.
        interval: the interval of the buffer whose states are kept.
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
    layouts: Sequence[FlatLayout],
    factors: Factors,
    compute_bytes: int,
    data_rank: int | None,
    *,
    master: bool,
) -> dict[str, int]:
    """Return the bytes that one rank keeps of its units, without gathered parameters.

    Args:
        config: the optimizer.
        layouts: layouts of the units' buffers.
        factors: sharding factors.
        compute_bytes: bytes per element of the parameters.
        data_rank: position of the rank on the data axis; None = the rank that keeps the most.
        master: whether master weights are stored (`needs_master`).

    Returns:
        The bytes of `parameters`, `gradients` (fp32 sums), `master` and `moments` (all other states
        of the optimizer).
    """
    rank = _fullest(layouts, factors) if data_rank is None else data_rank
    total = Counter(parameters=0, gradients=0, master=0, moments=0)
    for layout in layouts:
        cut = Cut(factors, layout.size, layout.bounds)
        own = cut.interval(rank, factors.optimizer)
        total["parameters"] += compute_bytes * cut.interval(rank, factors.params).length
        total["gradients"] += FP32_BYTES * cut.interval(rank, factors.grads).length
        total["master"] += FP32_BYTES * own.length if master else 0
        total["moments"] += moment_bytes(config, layout, own)
    return dict(total)


def saved_bytes(
    config: OptimizerConfig,
    layouts: Sequence[FlatLayout],
    factors: Factors,
    data_rank: int | None,
) -> int:
    """Return the bytes of all optimizer states of a rank: fp32 master weights and moments.

    The arguments are those of `rank_state_bytes`.
    """
    if config.name == "adamw_8bit":  # checkpoints store decoded moments
        config = config.model_copy(update={"name": "adamw"})
    states = rank_state_bytes(config, layouts, factors, 0, data_rank, master=True)
    return states["master"] + states["moments"]


def _fullest(layouts: Sequence[FlatLayout], factors: Factors) -> int:
    """Return the data rank with the most elements of optimizer states."""
    divided = [layout.bounds for layout in layouts if layout.bounds]
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
