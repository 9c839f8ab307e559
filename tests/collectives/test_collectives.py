"""Gathers, reductions and chains of them, on groups of one, two and three ranks."""

import pytest
import torch
import torch.distributed as dist

from frontier_llm.collectives.handles import DONE, Chain, Steps
from frontier_llm.collectives.primitives import ReduceScatter, all_gather, all_reduce
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.geometry.grid import Grid
from frontier_llm.launch.world import World
from tests.ranks import run_ranks


def traffic_of(world: World) -> Traffic:
    return Traffic(Grid(1, world.size, 1, world.ranks_per_node), world.rank)


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def gather(world: World, dtype: torch.dtype, pairwise: bool) -> tuple[list[float], float]:
    traffic = traffic_of(world)
    whole = torch.full((world.size * 5,), -1.0, dtype=dtype)
    whole.view(world.size, -1)[world.rank] = world.rank
    all_gather(whole, group(), traffic, "gather", pairwise=pairwise).wait()
    return whole.tolist(), traffic.take()["gather"].node


@pytest.mark.parametrize("pairwise", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gather_fills_every_part_in_order(size: int, dtype: torch.dtype, pairwise: bool) -> None:
    expected = [float(rank) for rank in range(size) for _ in range(5)]
    for whole, sent in run_ranks(gather, size, dtype, pairwise):
        assert whole == expected
        assert sent == 5 * dtype.itemsize * (size - 1)


def two_gathers_at_once(world: World) -> list[list[float]]:
    """Run several gathers at once, whose messages must not be mixed up."""
    traffic, wholes, handles = traffic_of(world), [], []
    for tag in range(4):
        whole = torch.zeros(world.size * 3)
        whole.view(world.size, -1)[world.rank] = 10 * tag + world.rank
        wholes.append(whole)
        handles.append(all_gather(whole, group(), traffic, "gather", pairwise=True))
    for handle in reversed(handles):
        handle.wait()
    return [whole.tolist() for whole in wholes]


def test_gathers_under_way_together_do_not_mix() -> None:
    expected = [[10.0 * tag + rank for rank in range(3) for _ in range(3)] for tag in range(4)]
    assert run_ranks(two_gathers_at_once, 3) == [expected] * 3


def scatter(
    world: World, dtype: torch.dtype, pairwise: bool
) -> tuple[torch.Tensor, torch.Tensor, float]:
    traffic = traffic_of(world)
    whole = torch.randn(world.size * 7, generator=torch.Generator().manual_seed(world.rank)).to(
        dtype
    )
    part = ReduceScatter(whole.clone(), group(), traffic, "scatter", pairwise=pairwise).wait()
    return whole, part, traffic.take()["scatter"].node


@pytest.mark.parametrize("pairwise", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_reduce_scatter_sums_in_fp32_whatever_dtype_is_sent(
    size: int, dtype: torch.dtype, pairwise: bool
) -> None:
    ranks = run_ranks(scatter, size, dtype, pairwise)
    exact = sum(whole.float() for whole, _, _ in ranks)
    assert isinstance(exact, torch.Tensor)
    for rank, (_, part, sent) in enumerate(ranks):
        assert part.dtype == torch.float32
        torch.testing.assert_close(part, exact.view(size, -1)[rank], rtol=1e-6, atol=1e-6)
        assert sent == pytest.approx(7 * dtype.itemsize * (size - 1))


def reduce(world: World) -> tuple[list[float], float]:
    traffic = traffic_of(world)
    tensor = torch.full((6,), float(world.rank + 1))
    all_reduce(tensor, group(), traffic, "reduce").wait()
    sent = traffic.take().get("reduce")
    return tensor.tolist(), sent.node if sent else 0.0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_reduce_adds_in_place(size: int) -> None:
    expected = [size * (size + 1) / 2] * 6
    for tensor, sent in run_ranks(reduce, size):
        assert tensor == expected
        assert sent == pytest.approx(2 * 24 * (size - 1) / size)


def test_chain_hands_each_result_on_and_starts_one_step_at_a_time() -> None:
    started, results = [], []

    class Step:
        def __init__(self, name: str) -> None:
            started.append(name)
            self.name = name

        def wait(self) -> str:
            return self.name.upper()

    def steps() -> Steps:
        results.append((yield Step("one")))
        results.append((yield Step("two")))

    chain = Chain(steps())
    assert started == ["one"]
    chain.advance()
    assert (started, results, chain.is_done) == (["one", "two"], ["ONE"], False)
    chain.wait()
    chain.wait()
    assert (results, chain.is_done) == (["ONE", "TWO"], True)


def test_chain_without_steps_is_done() -> None:
    def steps() -> Steps:
        return
        yield DONE

    assert Chain(steps()).is_done
