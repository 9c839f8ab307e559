"""Memory for encoded messages: buffers, and rounding errors that are kept for the next step."""

from collections import Counter
from collections.abc import Iterable, Iterator

from frontier_llm.config.collectives import CollectivesConfig
from frontier_llm.geometry.flat_layout import FlatLayout
from frontier_llm.geometry.formats import Format, StateFormats
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.partition import Digit, Factors
from frontier_llm.geometry.state_memory import FP32_BYTES

FEEDBACK_BYTES = 2
"""Bytes of one rounding error: bf16."""
BUFFER_BYTES = 64
"""Buffer sizes are multiples of this many bytes (collectives/slots.py)."""


def refresh_is_lossy(formats: StateFormats, factors: Factors, compute_bytes: int) -> bool:
    """Whether the refresh after an update rounds the parameters that it sends."""
    return factors.optimizer > factors.params and not formats.refresh.is_lossless(compute_bytes)


def feedback_bytes(config: CollectivesConfig, grid: Grid, factors: Factors, elements: int) -> int:
    """Return the bytes of the rounding errors that a rank keeps of a unit's gradients.

    Args:
        config: formats, and whether errors are kept.
        grid: decides which ranks share a node.
        factors: over how many ranks each state is cut.
        elements: size of the unit's buffer, padding included.
    """
    if not config.error_feedback:
        return 0
    formats, kept = StateFormats.at(config), 0
    sent: dict[Digit, int] = {"optimizer": elements // factors.grads}
    if factors.grads > 1:
        sent |= {"params": elements, "grads": elements // factors.params}
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
    """Return an upper bound on the buffers for encoded messages: the pool of a rank.

    Units of the same size use buffers of the same sizes. Each buffer counts as often as collectives
    that use it may run at the same time.
    """
    units = Counter((layout.size, layout.decayed) for layout in layouts)
    total = 0
    for (size, decayed), count in units.items():
        for buffer, limit in _buffers(formats, factors, size, decayed, compute_bytes):
            at_once = {"one": 1, "flow": units_in_flight + 1, "refresh": 2 * units_in_flight}[limit]
            total += _rounded(buffer) * min(count, at_once)
    return total


def _buffers(
    formats: StateFormats, factors: Factors, size: int, decayed: int, compute_bytes: int
) -> Iterator[tuple[int, str]]:
    """Yield the size of each buffer of one unit, and the limit that applies to their number.

    Sizes are those on the rank that sends most small elements, which lie at the end of the unit.
    """
    p, g, o = factors.params, factors.grads, factors.optimizer

    def slots(code: Format, parts: int, cut: int) -> int:
        """Return the bytes of the slots for all parts of the last of `cut` equal intervals."""
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
        yield size * compute_bytes, "one"  # packed gradients, returned once they are encoded
    for parts, cut in ((p if g > 1 else 1, 1), (g // p, p), (o // g, g)):
        if scattered and parts > 1:
            exchanged = max(slots(code, parts, cut) for code in scattered)
            yield from [(exchanged, "flow"), (exchanged, "flow")]
            yield size // cut // parts * FP32_BYTES, "flow"


def _rounded(count: int) -> int:
    return -(-count // BUFFER_BYTES) * BUFFER_BYTES
