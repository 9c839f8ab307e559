"""Measure latency and bandwidth of messages and collectives between ranks of this machine."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from frontier_llm.calibration.timing import device, finish, seconds_of
from frontier_llm.collectives.primitives import exchange
from frontier_llm.geometry.wire import all_reduce_bytes, gather_bytes

SIZES = {"cpu": (1 << 12, 1 << 16, 1 << 19, 1 << 21, 1 << 23), "cuda": (1 << 10, 1 << 20, 1 << 26)}
"""Bytes of the tensor of all ranks that are measured, by type of device."""
SECONDS = 0.15
"""Duration of the calls of one size."""
WARM_UP, LEAST_CALLS = 3, 5
OVERLAP_ELEMENTS, OVERLAP_SIZE = 1 << 21, 512
"""Elements of a message that is sent during matrix products, and the size of the matrices."""
OVERLAP_ROUNDS = 7


class Speed(NamedTuple):
    """Measured speed of one kind of message or collective, as that of a ring."""

    latency_seconds: float
    """Latency of one step around the ring."""
    bytes_per_second: float
    """Bytes per second that each rank sends."""


@dataclass(frozen=True)
class LinkFigures:
    """Measured speed of the link between ranks of one machine."""

    ranks: int
    messages: Speed
    """The messages of which the gathers and scatters of model states consist: on a CPU messages
    between all pairs of ranks, on a GPU all-gathers of the communication library."""
    collectives: dict[str, Speed]
    """The communication library's `all_reduce`, `all_gather` and `reduce_scatter`."""
    hidden_share: float
    """Share of the shorter time that is saved if messages and matrix products overlap."""


def measure_links() -> LinkFigures:
    """Measure on this rank. Collective over all ranks; there must be at least two."""
    ranks = dist.get_world_size()
    collectives = {
        "all_reduce": _speed(_all_reduce, 2 * (ranks - 1), all_reduce_bytes),
        "all_gather": _speed(_all_gather, ranks - 1, gather_bytes),
        "reduce_scatter": _speed(_reduce_scatter, ranks - 1, gather_bytes),
    }
    is_cpu = device().type == "cpu"
    messages = _speed(_pairs, ranks - 1, gather_bytes) if is_cpu else collectives["all_gather"]
    return LinkFigures(ranks, messages, collectives, _hidden_share())


def fit_speed(samples: Sequence[tuple[float, float]], steps: int) -> Speed:
    """Fit latency and bandwidth to measured calls, with the least sum of squared relative errors.

    Args:
        samples: pairs of the bytes that each rank sends in a call and the seconds of a call.
        steps: steps around the ring in a call.
    """
    # seconds = a + b x bytes, divided by the measured seconds: a least-squares problem of a and b
    rows = torch.tensor([[1 / s, sent / s] for sent, s in samples], dtype=torch.float64)
    ones = torch.ones(len(samples), 1, dtype=torch.float64)
    start, per_byte = torch.linalg.lstsq(rows, ones).solution.flatten().tolist()
    if start <= 0:  # noise: take the smallest call for the latency
        start = min(samples)[1]
    largest_bytes, largest_seconds = max(samples)
    if per_byte <= 0:
        per_byte = largest_seconds / largest_bytes
    return Speed(start / steps, 1 / per_byte)


def _speed(
    make: Callable[[int], Callable[[], None]], steps: int, sent: Callable[[float, int], float]
) -> Speed:
    """Measure one kind of collective.

    Args:
        make: returns a function that runs a collective of a number of bytes.
        steps: steps around a ring in a call.
        sent: bytes that each rank sends, from the bytes of all ranks and the number of ranks.
    """
    ranks = dist.get_world_size()
    samples = [(sent(size, ranks), _median_seconds(make(size))) for size in SIZES[device().type]]
    return fit_speed(samples, steps)


def _median_seconds(action: Callable[[], None]) -> float:
    """Return the median seconds of a call. The number of calls is the same on all ranks."""
    for _ in range(WARM_UP):
        action()
    start = time.perf_counter()
    action()
    finish()
    calls = torch.tensor(SECONDS / (time.perf_counter() - start), device=device())
    dist.all_reduce(calls, dist.ReduceOp.MIN)
    times = []
    for _ in range(max(LEAST_CALLS, int(calls))):
        start = time.perf_counter()
        action()
        finish()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _parts(size: int) -> torch.Tensor:
    """Return [ranks, elements] fp32 zeros that take `size` bytes."""
    ranks = dist.get_world_size()
    return torch.zeros(ranks, max(1, size // 4 // ranks), device=device())


def _all_reduce(size: int) -> Callable[[], None]:
    tensor = _parts(size)
    return lambda: _drop(dist.all_reduce(tensor))


def _all_gather(size: int) -> Callable[[], None]:
    whole = _parts(size)
    own, flat = whole[0].clone(), whole.view(-1)
    return lambda: _drop(dist.all_gather_into_tensor(flat, own))


def _reduce_scatter(size: int) -> Callable[[], None]:
    whole = _parts(size)
    own, flat = whole[0].clone(), whole.view(-1)
    return lambda: _drop(dist.reduce_scatter_tensor(own, flat))


def _pairs(size: int) -> Callable[[], None]:
    sent = _parts(size)
    received, world = sent.clone(), dist.group.WORLD
    assert world is not None
    return lambda: exchange(sent, received, world, pairwise=True).wait()


def _hidden_share() -> float:
    """Measure what messages and matrix products take alone and together.

    A message is sent in the background while the product runs, as gathers of model states are.
    """
    left, right = (torch.randn(OVERLAP_SIZE, OVERLAP_SIZE, device=device()) for _ in range(2))
    world, is_cpu = dist.group.WORLD, device().type == "cpu"
    assert world is not None
    sent = torch.zeros(dist.get_world_size(), OVERLAP_ELEMENTS, device=device())
    received = sent.clone()

    def send() -> None:
        exchange(sent, received, world, pairwise=is_cpu).wait()

    message = _median_seconds(send)
    product = seconds_of(lambda: left @ right)
    numbers = torch.tensor([message, product], device=device())
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    products = max(1, round(float(numbers[0] / numbers[1])))

    def compute() -> None:
        for _ in range(products):
            left @ right

    def both() -> None:
        work = exchange(sent, received, world, pairwise=is_cpu)
        compute()
        work.wait()

    alone, together = [], []
    for _ in range(OVERLAP_ROUNDS):
        alone.append([_once(send), _once(compute)])
        together.append(_once(both))
    sending, computing = (statistics.median(column) for column in zip(*alone, strict=True))
    saved = sending + computing - statistics.median(together)
    return min(1.0, max(0.0, saved / min(sending, computing)))


def _once(action: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    action()
    finish()
    return time.perf_counter() - start


def _drop(result: object) -> None:
    """Ignore a result."""
