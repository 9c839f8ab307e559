"""Count the memory for encoded messages (buffers, rounding errors that are kept) and for the loss.

Error feedback keeps the rounding error of a quantised gradient and adds it to the next gradient.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from frontier_llm.config.collectives import CollectivesConfig
from frontier_llm.geometry.flat_layout import FlatLayout
from frontier_llm.geometry.formats import Feedback, Format, StateFormats
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.state_memory import FP32_BYTES
from frontier_llm.units import MIB

BUFFER_BYTES = 64
"""Buffer sizes are multiples of this many bytes (collectives/slots.py)."""
LOSS_CHUNK_BYTES = 128 * MIB
"""Size of the fp32 logits that the loss computes at a time on a GPU: enough to fill it."""
CPU_LOSS_CHUNK_BYTES = 2**19
"""The same on a CPU: small enough for its caches."""


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
    layouts: Iterable[FlatLayout],
    compute_bytes: int,
    units_in_flight: int,
) -> int:
    """Return an upper bound on the bytes of the buffers for encoded messages on a rank.

    Units of the same size share buffers. Each buffer counts as many times as the number of
    collectives that may use such a buffer at the same time.
    """
    units = Counter((layout.size, layout.decayed) for layout in layouts)
    total = 0
    for (size, decayed), count in units.items():
        for buffer_bytes, limit in _buffers(formats, factors, size, decayed, compute_bytes):
            concurrent = {
                "one": 1,
                "flow": units_in_flight + 1,
                "refresh": 2 * units_in_flight,
            }[limit]
            total += _rounded(buffer_bytes) * min(count, concurrent)
    return total


def _buffers(
    formats: StateFormats, factors: Factors, size: int, decayed: int, compute_bytes: int
) -> Iterator[tuple[int, str]]:
    """Yield the bytes of each buffer of one unit, and the limit on the number of such buffers.

    The limit `one` allows one buffer, `flow` one per unit in flight and one more, and `refresh` two
    per unit in flight. The bytes are those on the rank with the last interval of the unit. Its
    messages are the longest, because norms and biases, which are sent in 16 bits, lie at the end of
    the buffer. `size` is the number of elements of the buffer. Its first `decayed` elements belong
    to matrices (`FlatLayout.decayed`), and only these may be quantised.
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
    yield from ((buffer_bytes, "flow") for buffer_bytes in gathered)
    if o > p and not formats.refresh.is_lossless(compute_bytes):
        yield slots(formats.refresh, o // p, p), "refresh"
    if g > 1 and any(grads_format.is_quantised for grads_format in formats.grads):
        yield size * compute_bytes, "one"  # gradients of a micro-batch, freed when encoded
    for hop in factors.collective_hops:
        of_hop = formats.sums if hop.digit == "replica" else formats.grads
        exchanged = [
            slots(message_format, hop.width, hop.low)
            for message_format in set(of_hop)
            if message_format.is_quantised
        ]
        if exchanged:
            yield from [(max(exchanged), "flow")] * 2  # sent and received slots
            yield size // hop.high * FP32_BYTES, "flow"  # the fp32 sum
    replicas = factors.width("replica")
    if factors.divides_sums and replicas > 1:
        gathered_sums = [
            slots(message_format, replicas, o)
            for message_format in set(formats.sums)
            if not message_format.is_lossless(FP32_BYTES)
        ]
        yield max(gathered_sums, default=0), "flow"


def _rounded(count: int) -> int:
    return -(-count // BUFFER_BYTES) * BUFFER_BYTES
