"""Measure latency and bandwidth of messages and collectives between the ranks of a job."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle
from typing import NamedTuple

import torch
import torch.distributed as dist

from frontier_lab.calibration.device import COLD_BYTES, device, finish, seconds_of
from frontier_llm.collectives.primitives import ReduceScatter, all_gather, exchange
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.wire import all_reduce_bytes, gather_bytes

SIZES = {"cpu": (1 << 12, 1 << 16, 1 << 19, 1 << 21, 1 << 23), "cuda": (1 << 10, 1 << 20, 1 << 26)}
"""Bytes of the tensor of all ranks that are measured, by type of device."""
WARM_UP, CALLS = 5, 60
"""Calls of one size before the measured ones, and measured calls."""
PRODUCT, PRODUCTS = 256, 8
"""Size and number of the matrix products between two calls."""
MOST_TENSORS = 64
"""Most tensors that the calls cycle through."""
OVERLAP_ELEMENTS, OVERLAP_SIZE = 1 << 21, 512
"""Elements of a message that is sent during matrix products, and the size of the matrices."""
OVERLAP_ROUNDS = 20


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
    """The gathers of model states: on a CPU messages between all pairs of ranks, on a GPU
    all-gathers of the communication library."""
    collectives: dict[str, Speed]
    """The collectives that config/cluster.py names."""
    hidden_share: float
    """Share of the shorter time that is saved if messages and matrix products overlap."""


def measure_links() -> LinkFigures:
    """Measure on this rank. Collective over all ranks; there must be at least two."""
    ranks = dist.get_world_size()
    return LinkFigures(
        ranks,
        _speed(_gather_states, ranks - 1, gather_bytes),
        {
            **_library_speeds(_speed),
            "gradient_scatter": _speed(_scatter_gradients, ranks - 1, gather_bytes),
        },
        _hidden_share(),
    )


def network_speeds(sizes: Sequence[int], calls: int) -> dict[str, Speed]:
    """Measure the library's collectives, an exchange, and sends to the rank half-way around.

    If the ranks fill an even number of nodes, all sends go to other nodes. Collective over all
    ranks; there must be at least two. `sizes` are bytes of the tensor of all ranks.
    """
    speed = partial(_speed, sizes=sizes, calls=calls)
    return {
        **_library_speeds(speed),
        "all_to_all": speed(_exchange, 1, gather_bytes),
        "send": speed(_send_half_way, 1, lambda size, ranks: size),
    }


def _library_speeds(speed: Callable[..., Speed]) -> dict[str, Speed]:
    steps = dist.get_world_size() - 1
    return {
        "all_reduce": speed(_all_reduce, 2 * steps, all_reduce_bytes),
        "all_gather": speed(_all_gather, steps, gather_bytes),
        "reduce_scatter": speed(_reduce_scatter, steps, gather_bytes),
    }


def fit_speed(samples: Sequence[tuple[float, float]], steps: int) -> Speed:
    """Fit latency and bandwidth to measured calls, with the least sum of squared relative errors.

    `samples` are pairs of the bytes that each rank sends in a call and the seconds of a call; a
    call has `steps` steps around the ring.
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
    run: Callable[[torch.Tensor], object],
    steps: int,
    sent: Callable[[float, int], float],
    sizes: Sequence[int] = (),
    calls: int = CALLS,
) -> Speed:
    """Measure one kind of collective.

    `run` takes a tensor of [ranks, elements] fp32. `sent` returns the bytes that each rank sends,
    from the bytes of all ranks and the number of ranks.
    """
    ranks = dist.get_world_size()
    sizes = sizes or SIZES[device().type]
    samples = [(sent(size, ranks), _added_seconds(run, size, calls)) for size in sizes]
    return fit_speed(samples, steps)


def _added_seconds(run: Callable[[torch.Tensor], object], size: int, calls: int) -> float:
    """Return the seconds of a collective of `size` bytes that follows matrix products.

    In a step, ranks compute between collectives. Then they do not start at exactly the same time,
    the threads of the communication library sleep, and the tensors are not in the caches.
    """
    ranks = dist.get_world_size()
    shape = (ranks, max(1, size // 4 // ranks))
    count = max(1, min(MOST_TENSORS, COLD_BYTES[device().type] // size))
    tensors = cycle([torch.zeros(shape, device=device()) for _ in range(count)])
    left, right = (torch.randn(PRODUCT, PRODUCT, device=device()) for _ in range(2))
    seconds = []
    for number in range(WARM_UP + calls):
        dist.barrier()
        for _ in range(PRODUCTS):
            left @ right
        finish()
        middle = time.perf_counter()
        run(next(tensors))
        finish()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - middle)
    mean = torch.tensor(_trimmed_mean(seconds), device=device())
    dist.all_reduce(mean)
    return float(mean) / ranks


def _trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the smallest and the largest tenth.

    A step has many collectives, whose times vary a lot: their mean counts.
    """
    tenth = len(values) // 10
    return statistics.mean(sorted(values)[tenth : len(values) - tenth])


def _all_reduce(tensor: torch.Tensor) -> object:
    return dist.all_reduce(tensor)


def _all_gather(tensor: torch.Tensor) -> object:
    return dist.all_gather_into_tensor(tensor.view(-1), tensor[dist.get_rank()].clone())


def _reduce_scatter(tensor: torch.Tensor) -> object:
    return dist.reduce_scatter_tensor(torch.empty_like(tensor[0]), tensor.view(-1))


def _exchange(tensor: torch.Tensor) -> object:
    world = dist.group.WORLD
    assert world is not None
    return exchange(tensor, torch.empty_like(tensor), world, pairwise=_is_cpu()).wait()


def _send_half_way(tensor: torch.Tensor) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    send = dist.P2POp(dist.isend, tensor, (rank + ranks // 2) % ranks)
    receive = dist.P2POp(dist.irecv, torch.empty_like(tensor), (rank - ranks // 2) % ranks)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def _gather_states(tensor: torch.Tensor) -> object:
    world = dist.group.WORLD
    assert world is not None
    return all_gather(tensor.view(-1), world, _traffic(), "calibrate", pairwise=_is_cpu()).wait()


def _scatter_gradients(tensor: torch.Tensor) -> object:
    world = dist.group.WORLD
    assert world is not None
    flat = tensor.view(-1)
    return ReduceScatter(flat, world, _traffic(), "calibrate", pairwise=_is_cpu()).wait()


def _is_cpu() -> bool:
    return device().type == "cpu"


@cache
def _traffic() -> Traffic:
    """Return a counter for the bytes, which nobody reads."""
    ranks = dist.get_world_size()
    return Traffic(Grid(1, ranks, 1, ranks), dist.get_rank())


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

    send()
    message = statistics.median(_once(send) for _ in range(OVERLAP_ROUNDS))
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
    sending, computing = (_trimmed_mean(column) for column in zip(*alone, strict=True))
    saved = sending + computing - _trimmed_mean(together)
    return min(1.0, max(0.0, saved / min(sending, computing)))


def _once(action: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    action()
    finish()
    return time.perf_counter() - start
