"""Gathers and reductions in every format, on one to four ranks: bits, bounds, bytes, buffers."""

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from frontier_llm.collectives.blockwise import PART_SEED_STRIDE
from frontier_llm.collectives.handles import Chain, Steps
from frontier_llm.collectives.kernel_choice import choose_kernels
from frontier_llm.collectives.residual import Residual
from frontier_llm.collectives.slots import BufferPool
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.collectives.transport import Transport
from frontier_llm.geometry.formats import BF16, FP32, Format, LevelFormats, StateFormats
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.state_memory import BUFFER_BYTES
from frontier_llm.geometry.wire import Sent
from frontier_llm.launch.world import World
from tests.covering import covering
from tests.ranks import run_ranks
from tests.streams.mutations import Mutation, mutated

pytestmark = pytest.mark.slow

INT8, INT4 = Format("int8", 32, 2), Format("int4", 32, 2)
CPU = torch.device("cpu")


def transport_of(world: World, code: Format, dtype: torch.dtype = torch.float32) -> Transport:
    formats = StateFormats(code, code, code, code, code)
    traffic = Traffic(Grid(1, world.size, 1, world.ranks_per_node), world.rank)
    return Transport(
        lambda _: formats, traffic, choose_kernels("auto", CPU), dtype, CPU, world.rank
    )


def mine(rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(elements, generator=generator).to(dtype)


def world_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def hops_of(world: World, count: int) -> list[dist.ProcessGroup]:
    """Return the group of all ranks, or groups of 4 ranks inside and between two nodes."""
    if count == 1:
        return [world_group()]
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    return [groups[world.rank // 2], groups[2 + world.rank % 2]]


def residuals_of(
    groups: Sequence[dist.ProcessGroup], elements: int, block_elements: int | None = None
) -> list[Residual | None]:
    """Return the rounding errors of a buffer that is reduced over one group after the other."""
    found: list[Residual | None] = []
    for group in groups:
        elements //= group.size()
        found.append(Residual.zeros(group.size(), elements, CPU, block_elements))
    return found


def gather(
    world: World, code: Format, dtype: torch.dtype, elements: int, border: int
) -> tuple[torch.Tensor, Sent, Sent]:
    transport = transport_of(world, code, dtype)
    groups = [world_group()] if world.size > 1 else []
    for _ in range(3):
        whole = torch.full((world.size * elements,), 9.0, dtype=dtype)
        whole.view(world.size, -1)[world.rank] = mine(world.rank, elements, dtype)
        Chain(transport.gather(whole, groups, code, border, "gather")).wait()
    assert not transport.pool._lent, "buffers were not given back"
    sent = transport.traffic.take().get("gather", Sent())
    plain = transport.traffic.take_unquantised().get("gather", Sent())
    return whole, sent, plain


CASES = [
    (code, dtype)
    for code in (FP32, BF16, INT8, INT4)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]


def gather_all(world: World, elements: int, border: int) -> list[Any]:
    return [gather(world, code, dtype, elements, border) for code, dtype in CASES]


@pytest.mark.parametrize("size", covering([1, 2, 3], [1, 2]))
def test_a_gather_gives_every_rank_the_same_bits(size: int) -> None:
    elements, border = 77, size * 77 - 40
    found = run_ranks(gather_all, size, elements, border)
    for (code, dtype), *ranks in zip(CASES, *found, strict=True):
        exact = torch.cat([mine(rank, elements, dtype) for rank in range(size)])
        whole, sent, plain = ranks[0]
        for other, *_ in ranks:
            assert torch.equal(other, whole), "the owner reads what the others read"
        slot = plain_bytes = dtype.itemsize * elements
        if size == 1 or code.is_lossless(dtype.itemsize):
            assert torch.equal(whole, exact)
        else:
            small = 2.0**-8 * exact.float().abs().max()
            step = 2 * exact.float().abs().max() / code.largest if code.is_quantised else 0.0
            assert (whole.float() - exact.float()).abs().max() <= step / 2 + small
            assert not torch.equal(whole, exact)
            leading = border if code.is_quantised else 0
            torch.testing.assert_close(whole[leading:], exact[leading:], rtol=2**-8, atol=0)
            slot = code.slot_bytes(elements, size, border)
        assert sent == Sent(node=3 * slot * (size - 1))
        assert plain == Sent(node=3 * plain_bytes * (size - 1))


@pytest.mark.parametrize("elements", [0, 1])
def test_parts_of_no_or_one_element(elements: int) -> None:
    for whole, *_ in run_ranks(gather, 3, INT4, torch.float32, elements, 3 * elements):
        assert whole.numel() == 3 * elements
        assert whole.isfinite().all()


def two_hops(world: World, code: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather over two groups of four ranks; neighbouring parts belong to the first group."""
    transport = transport_of(world, code)
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    first, second = groups[world.rank // 2], groups[2 + world.rank % 2]
    whole = torch.zeros(4 * 50)
    whole.view(4, -1)[world.rank] = mine(world.rank, 50, torch.float32)
    once = whole.clone()
    Chain(transport.gather(whole, (first, second), code, 200, "refresh")).wait()
    Chain(transport.gather(once, (world_group(),), code, 200, "refresh")).wait()
    return whole, once


def test_a_gather_over_two_groups_rounds_once() -> None:
    """The second hop passes on the slots of the first: as exact as one hop over all ranks."""
    for two, one in run_ranks(two_hops, 4, INT4):
        assert torch.equal(two, one)


def reduce(
    world: World, codes: Sequence[Format], elements: int, feedback: int, rounds: int
) -> tuple[torch.Tensor, torch.Tensor, Sent, list[int]]:
    """Reduce over all ranks at once, or inside nodes and then between two nodes.

    `feedback`: bits per element of residuals; 0 = there are none.
    """
    formats = StateFormats(grads=LevelFormats(FP32, codes[0], codes[-1]))
    traffic = Traffic(Grid(1, world.size, 1, world.ranks_per_node), world.rank)
    kernels = choose_kernels("auto", CPU)
    transport = Transport(lambda _: formats, traffic, kernels, torch.float32, CPU, world.rank)
    hops = hops_of(world, len(codes))
    errors = residuals_of(hops, elements, INT4.block_elements if feedback == 8 else None)
    errors = errors if feedback else [None for _ in hops]
    whole, total = mine(world.rank, elements, torch.float32), torch.zeros(elements // world.size)
    allocated = []

    def steps(add: bool) -> Steps:
        packed = transport.pool.take(elements, torch.float32)
        packed.copy_(whole)
        yield from transport.reduce(
            packed, list(zip(hops, errors, strict=True)), elements - 9, "reduce", total, add=add
        )

    for done in range(rounds):
        Chain(steps(add=done > 0)).wait()
        assert not transport.pool._lent, "buffers were not given back"
        allocated.append(transport.pool.allocated_bytes)
    return whole, total / rounds, traffic.take()["reduce"], allocated


@pytest.mark.parametrize("code", [FP32, BF16, INT8, INT4], ids=lambda code: code.name)
@pytest.mark.parametrize("size", covering([2, 3], [2]))
def test_a_reduction_has_the_rounding_errors_of_the_other_ranks(size: int, code: Format) -> None:
    elements = size * 51
    # after two rounds, a sum that replaces the first and is added twice would be as large
    ranks = run_ranks(reduce, size, (code,), elements, 0, 3)
    exact = sum(whole for whole, *_ in ranks)
    assert isinstance(exact, torch.Tensor)
    for rank, (_, part, sent, allocated) in enumerate(ranks):
        others = [whole.abs().max() for i, (whole, *_) in enumerate(ranks) if i != rank]
        bound = sum(others) * {"fp32": 1e-6, "bf16": 2**-8}.get(code.name, 0.51 / code.largest)
        error = (part - exact.view(size, -1)[rank]).abs().max()
        assert error <= bound * (size if code.name == "bf16" else 1)
        slot = code.slot_bytes(51, size, elements - 9) if code.is_quantised else 51 * code.bits // 8
        assert sent.node == pytest.approx(3 * slot * (size - 1))
        assert allocated[0] == allocated[2], "later rounds use the first one's buffers"


def test_two_hops_take_the_format_of_their_links() -> None:
    ranks = run_ranks(reduce, 4, (INT8, INT4), 400, 0, 1, ranks_per_node=2)
    exact = sum(whole for whole, *_ in ranks)
    assert isinstance(exact, torch.Tensor)
    for rank, (_, part, sent, _) in enumerate(ranks):
        position = rank % 2 * 2 + rank // 2  # the first group's parts are the large ones
        wanted = exact.view(4, -1)[position]
        assert (part - wanted).abs().max() < 0.15 * exact.abs().max()
        assert sent == Sent(
            node=INT8.slot_bytes(200, 2, 391),
            network=INT4.slot_bytes(100, 2, 200 if rank % 2 == 0 else 191),
        )


def all_reduce(
    world: World, codes: Sequence[Format], elements: int, feedback: bool, rounds: int
) -> tuple[torch.Tensor, torch.Tensor, Sent, list[int]]:
    """Sum over all ranks at once, or inside nodes, between two nodes and back, several times.

    Return the summand and the mean of the sums.
    """
    traffic = Traffic(Grid(1, world.size, 1, world.ranks_per_node), world.rank)
    kernels = choose_kernels("auto", CPU)
    formats = StateFormats(sums=LevelFormats(FP32, codes[0], codes[-1]))
    transport = Transport(lambda _: formats, traffic, kernels, torch.float32, CPU, world.rank)
    whole, total = mine(world.rank, elements, torch.float32), torch.zeros(elements)
    hops = hops_of(world, len(codes))
    errors = residuals_of(hops, elements) if feedback else [None for _ in hops]
    allocated = []
    for _ in range(rounds):
        buffer = whole.clone()
        Chain(transport.all_reduce(buffer, hops, elements - 9, "sums", errors)).wait()
        assert not transport.pool._lent, "buffers were not given back"
        allocated.append(transport.pool.allocated_bytes)
        total += buffer
    return whole, total / rounds, traffic.take()["sums"], allocated


@pytest.mark.parametrize("code", [FP32, BF16, INT8, INT4], ids=lambda code: code.name)
@pytest.mark.parametrize("size", covering([2, 3], [2]))
def test_a_sum_is_equal_on_all_ranks_and_rounded_once(size: int, code: Format) -> None:
    elements = size * 51
    ranks = run_ranks(all_reduce, size, (code,), elements, False, 2)
    exact = sum(whole for whole, *_ in ranks)
    assert isinstance(exact, torch.Tensor)
    relative = {"fp32": 1e-6, "bf16": 2**-8}.get(code.name, 0.51 / code.largest)
    # a part of the sum has the rounding errors of its summands, and its own when it is sent
    rounded = sum(float(whole.abs().max()) for whole, *_ in ranks) + float(exact.abs().max())
    slot = code.slot_bytes(51, size, elements - 9)
    reduced = 51 * 2 if code.name == "bf16" else slot  # in bf16 the summands are sent without slots
    each_way = (slot + reduced if code.name != "fp32" else 2 * 51 * 4) * (size - 1)
    for _, mean, sent, allocated in ranks:
        assert torch.equal(mean, ranks[0][1])
        assert (mean - exact).abs().max() <= relative * rounded
        assert sent.node == pytest.approx(2 * each_way)
        assert allocated[0] == allocated[1], "the second round uses the first one's buffers"
    assert torch.equal(ranks[0][1], exact) == (code is FP32 and size == 2)


def test_sums_over_two_hops_are_equal_and_use_formats_of_links() -> None:
    ranks = run_ranks(all_reduce, 4, (INT8, INT4), 400, False, 1, ranks_per_node=2)
    exact = sum(whole for whole, *_ in ranks)
    assert isinstance(exact, torch.Tensor)
    for rank, (_, total, sent, _) in enumerate(ranks):
        assert torch.equal(total, ranks[0][1])
        assert (total - exact).abs().max() < 0.25 * exact.abs().max()
        gathered = INT4.slot_bytes(100, 4, 391)  # of which two are passed on inside a node
        assert sent == Sent(
            node=INT8.slot_bytes(200, 2, 391) + 2 * gathered,
            network=INT4.slot_bytes(100, 2, 200 if rank % 2 == 0 else 191) + gathered,
        )


SMALL = 0.04
"""Share of the error that stays with feedback: 0.019 over two groups, 0.076 with a mistake."""


def error_of_sums(size: int, feedback: bool, mutation: Mutation | None = None) -> float:
    """Return the largest error of the mean of 60 sums, over one group or over two of two ranks."""
    arguments = ((INT4,) * (size // 2), 64, feedback, 60)
    ranks = run_ranks(mutated, size, mutation, all_reduce, *arguments, ranks_per_node=1)
    exact = sum(whole for whole, *_ in ranks)
    return float((ranks[0][1] - exact).abs().max())


@pytest.mark.parametrize("size", covering([2, 4], [2]))
def test_error_feedback_makes_the_mean_of_many_sums_exact(size: int) -> None:
    assert error_of_sums(size, True) < SMALL * error_of_sums(size, False)


MISTAKES = {
    "rounding errors of another part": ("groups[-1].rank()", "groups[0].rank()"),
    "no rounding errors of sums": ("None if last is None else last", "last and None and last"),
    "no rounding errors of the first group": ("residuals, strict", "[None, residuals[1]], strict"),
    "no rounding errors of the last group": ("residuals, strict", "[residuals[0], None], strict"),
}
"""By name: the change of `Transport.all_reduce`."""


@pytest.mark.parametrize("mistake", covering(MISTAKES, [*MISTAKES][1:]))
def test_wrong_rounding_errors_are_noticed(mistake: str) -> None:
    old, new = MISTAKES[mistake]
    wrong = error_of_sums(4, True, (Transport.all_reduce, old, new))
    assert wrong > SMALL * error_of_sums(4, False)


def test_every_part_of_every_message_has_a_rounding_seed_of_its_own() -> None:
    seeds = []
    for rank in range(4):
        transport = transport_of(World(rank, 4, rank, 4, "host", "local", "host", 1), INT4)
        for step in (1, 2, 3):
            transport.begin_step(step)
            for parts in (3, 1, 3):
                first = transport._take_seed(parts)
                seeds += [(first + part * PART_SEED_STRIDE) % 2**32 for part in range(parts)]
    assert len(set(seeds)) == len(seeds) == 4 * 3 * 7


def test_error_feedback_makes_the_mean_of_many_reductions_exact() -> None:
    means = {}
    for feedback in (0, 8, 16):
        ranks = run_ranks(reduce, 2, (INT4,), 64, feedback, 60, ranks_per_node=1)
        exact = sum(whole for whole, *_ in ranks)
        assert isinstance(exact, torch.Tensor)
        errors = [
            (part - exact.view(2, -1)[r]).abs().max() for r, (_, part, *_) in enumerate(ranks)
        ]
        means[feedback] = max(errors)
    assert means[16] < 0.1 * means[0]
    assert means[8] < 0.1 * means[0]


def test_a_small_buffer_is_freed_before_the_larger_one_is_allocated(monkeypatch):
    pool, is_freed = BufferPool(torch.device("cpu")), []
    first = pool.take(9 * BUFFER_BYTES)
    old = weakref.ref(pool._lent[first.data_ptr()])
    pool.give_back(first)
    del first
    empty = torch.empty

    def noting(*arguments, **options):
        is_freed.append(old() is None)
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", noting)
    larger = pool.take(10 * BUFFER_BYTES)
    assert is_freed == [True]
    assert pool.allocated_bytes == larger.nbytes == 10 * BUFFER_BYTES
