"""With `collectives.communicators=few` or `one`, collectives run one after another."""

import gc
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from frontier_llm.geometry.stage_messages import Launch, Message
from frontier_llm.launch.world import World
from frontier_llm.parallel.lanes import Lane, leave_lane, use_lane
from frontier_llm.parallel.stage_exchange import StageExchange
from tests.covering import covering
from tests.ranks import in_turn, run_ranks
from tests.streams.test_sharded_steps import CASES, SMALL
from tests.streams.virtual_cuda import virtual_cuda
from tests.streams.virtual_device import Order
from tests.trainer.rig import make_rig
from tests.values import tiny_values

pytestmark = pytest.mark.slow

Found = tuple[list[tuple[float, float]], list[torch.Tensor], bool]


def train(world: World, values: dict[str, Any], order: Order | None, count: str) -> Found:
    """Train two steps; None is the order of the program.

    Returns:
        The loss and norm of each step, this rank's states, and whether the collectives that must
        not overlap have run in the order of their launches.
    """
    rig = make_rig(world, values)
    batches = [rig.batches(step) for step in range(2)]
    tensor = rig.groups.tensor if count == "few" else None
    ran = []
    with nullcontext() if order is None else virtual_cuda(order) as device:
        if device is not None and count != "many":
            use_lane(Lane(tensor))
        steps = [rig.step.run(step + 1, batch, 0.01) for step, batch in enumerate(batches)]
        rig.states.settle()
        leave_lane()
        ran = device.ran if device is not None else []
    numbers = [number for number, group in ran if group is not tensor]
    states = [state.clone() for one in rig.states.shards() for state in one.states.values()]
    return [(s.loss, s.grad_norm) for s in steps], states, numbers == sorted(numbers)


def orders(results: Sequence[Sequence[Found]]) -> list[bool]:
    """Return for each case whether the collectives of all ranks have run in order."""
    return [all(found[2] for found in case) for case in zip(*results, strict=True)]


LANES = {"three dimensions": "few", "(2, 2, 4) quantised": "one"}
"""The number of communicators with which a case always runs."""
CASES_AND_COUNTS = [(case, count) for case in LANES for count in ("few", "one")]
COVERED = [chosen for chosen in CASES_AND_COUNTS if chosen != ("three dimensions", "few")]


@pytest.mark.parametrize("chosen", covering(CASES_AND_COUNTS, COVERED), ids=", ".join)
def test_collectives_in_a_lane_run_in_the_order_of_their_launches(chosen: tuple[str, str]) -> None:
    case, count = chosen
    size, _, overrides = CASES[case]
    values = tiny_values(*SMALL, *overrides)
    cases = [(values, None, "many"), (values, Order.MIXED, "many")]
    cases += [(values, order, count) for order in Order]
    results = run_ranks(in_turn, size, train, cases, ranks_per_node=2, timeout=180)
    assert orders(results) == [True, False, *[True] * (len(cases) - 2)]
    for of_rank in results:
        numbers, states, _ = of_rank[0]
        for found, found_states, _ in of_rank[1:]:
            assert found == numbers
            assert all(map(torch.equal, states, found_states))


class Underway:
    """A collective that does not end by itself."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return False


def is_alive(reference: "weakref.ref[torch.Tensor]") -> bool:
    gc.collect()
    return reference() is not None


def test_tensors_live_until_their_collective_has_ended() -> None:
    tensor = torch.ones(4)
    reference = weakref.ref(tensor)
    with virtual_cuda(Order.LATE):
        reduce = Lane().collective(lambda *_, **__: Underway())
        handle = reduce(tensor, async_op=True)
        del tensor
        assert is_alive(reference)
        handle.wait()
    assert not is_alive(reference)


def test_a_sent_tensor_lives_until_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "P2POp", lambda *arguments: None)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda _: [Underway()])
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    exchange = StageExchange(mock.Mock(), lambda _: 4, torch.float32, torch.device("cpu"))
    tensor = torch.ones(4)
    reference = weakref.ref(tensor)
    exchange.launch(Launch(Message(True, 1, 0), 1, is_send=True), tensor)
    del tensor
    assert is_alive(reference)
    # the other stage has read one message before it sends this one
    answer = Launch(Message(False, 0, 0), 1, is_send=False, delivered=1)
    exchange.launch(answer, None)
    exchange.receive(answer.message)
    assert not is_alive(reference)
