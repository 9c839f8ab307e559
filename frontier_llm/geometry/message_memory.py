"""Memory that encoded messages need beside the model states: buffers, and kept rounding errors."""

from collections import Counter
from collections.abc import Iterable, Iterator

from frontier_llm.config.collectives import CollectivesConfig
from frontier_llm.geometry.flat_layout import FlatLayout
from frontier_llm.geometry.formats import Format, StateFormats
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.partition import Digit, Factors
from frontier_llm.geometry.state_memory import FP32_BYTES

FEEDBACK_BYTES = 2
"""Of an error: bf16."""
BUFFER_BYTES = 64
"""Buffers are multiples of it (collectives/pool.py)."""


def rounds_refresh(formats: StateFormats, factors: Factors, compute_bytes: int) -> bool:
    """Whether parameters come out of the refresh less exact than their masters."""
    return factors.optimizer > factors.params and not formats.refresh.is_lossless(compute_bytes)


def feedback_bytes(config: CollectivesConfig, grid: Grid, factors: Factors, elements: int) -> int:
    """Return the bytes in which a rank keeps rounding errors of a unit's gradients.

    Args:
        config: formats, and whether errors are kept.
        grid: where nodes end.
        factors: over how many ranks each state is cut.
        elements: of the unit's buffer, padding included.
    """
    if not config.error_feedback:
        return 0
    formats, kept = StateFormats.at(config), 0
    sent: dict[Digit, int] = {"c": elements // factors.grads}
    if factors.grads > 1:
        sent |= {"a": elements, "b": elements // factors.params}
    ranks = grid.data_group(0)
    for digit, count in sent.items():
        nodes = {grid.node(ranks[member]) for member in factors.group(digit, 0)}
        if len(nodes) > 1 and formats.grads_across.is_quantised:
            kept += FEEDBACK_BYTES * count
    return kept


def message_bytes(
    formats: StateFormats,
    factors: Factors,
    layouts: Iterable[FlatLayout],
    compute_bytes: int,
    units_in_flight: int,
) -> int:
    """Bound the buffers that encoded messages lie in: the pool of a rank.

    For units of each size, what a flow borrows, as often as such flows may be under way at once.
    """
    alike = Counter((layout.size, layout.decayed) for layout in layouts)
    total = 0
    for (size, decayed), count in alike.items():
        for buffer, limit in _borrowed(formats, factors, size, decayed, compute_bytes):
            at_once = {"one": 1, "flow": units_in_flight + 1, "refresh": 2 * units_in_flight}[limit]
            total += _rounded(buffer) * min(count, at_once)
    return total


def _borrowed(
    formats: StateFormats, factors: Factors, size: int, decayed: int, compute_bytes: int
) -> Iterator[tuple[int, str]]:
    """Yield the buffers of one unit, and what limits their number.

    On the rank that sends most small elements: it has the end of the buffer.
    """
    p, g, o = factors.params, factors.grads, factors.optimizer

    def slots(code: Format, parts: int, cut: int) -> int:
        """Return the bytes of slots for all parts of the last of `cut` equal intervals."""
        length = size // cut
        border = max(0, decayed - (size - length))
        return parts * code.slot_bytes(length // parts, parts, border)

    gathered = {
        slots(code, p, 1)
        for code in (formats.params, formats.params_backward)
        if p > 1 and not code.is_lossless(compute_bytes)
    }
    yield from ((buffer, "flow") for buffer in gathered)
    if o > p and not formats.refresh.is_lossless(compute_bytes):
        yield slots(formats.refresh, o // p, p), "refresh"
    scattered = [code for code in (formats.grads, formats.grads_across) if code.is_quantised]
    if scattered and g > 1:
        yield size * compute_bytes, "one"  # packed, and given back as soon as it is encoded
    for parts, cut in ((p if g > 1 else 1, 1), (g // p, p), (o // g, g)):
        if scattered and parts > 1:
            exchanged = max(slots(code, parts, cut) for code in scattered)
            yield from [(exchanged, "flow"), (exchanged, "flow")]
            yield size // cut // parts * FP32_BYTES, "flow"


def _rounded(count: int) -> int:
    return -(-count // BUFFER_BYTES) * BUFFER_BYTES
