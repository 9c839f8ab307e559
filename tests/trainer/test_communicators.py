"""The planner counts the process groups that torch.distributed really gets collectives for."""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from frontier_llm.config.run import RunConfig
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.geometry.communicators import communicators, tied_stages
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.launch.world import World
from frontier_llm.parallel import groups
from frontier_llm.parallel.megatron_cpu import install
from frontier_llm.trainer import connect
from tests.ranks import run_ranks
from tests.trainer.rig import make_rig
from tests.values import TINY_T5, tiny_values

pytestmark = pytest.mark.slow

Sizes = dict[str, tuple[int, bool]]
"""For each group with more than one rank: its size, and whether it had all-to-alls."""


class UsedGroups(TorchDispatchMode):
    """Notes every group that gets a c10d operator."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Sizes = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if func.namespace == "c10d":
            place = 1 if name in ("allreduce_", "send", "recv_") else 2
            group = dist.ProcessGroup.unbox(args[place])
            exchanged = self.sizes.get(group.group_name, (0, False))[1]
            if group.size() > 1:
                direct = exchanged or name == "alltoall_base_"
                self.sizes[group.group_name] = (group.size(), direct)
        return func(*args, **(kwargs or {}))


LAYOUTS = {
    "replicas": ["sharding=replicated"],
    "tied pipeline": ["parallel.pipeline=2", "model.tied=true"],
    "pipeline": ["parallel.pipeline=2", "parallel.tensor=2", "model.tied=false"],
    "zero3": ["sharding=zero3"],
    "three digits": ["sharding.params=2", "sharding.grads=2", "sharding.optimizer=4"],
    "zeropp": ["sharding=zero3", "collectives=zeropp"],
    "quantised replicas": [
        "sharding.params=1", "sharding.grads=2", "sharding.optimizer=2", "collectives=zeropp",
    ],
    "t5": [*TINY_T5, "parallel.pipeline=2"],
}  # fmt: skip


def use(world: World, values: dict[str, Any]) -> tuple[Counter[Any], Counter[Any]]:
    groups.shared_groups = nullcontext  # every group of its own, as with NCCL
    rig = make_rig(world, values)
    batches = rig.batches(0)
    with UsedGroups() as used:
        rig.step.run(1, batches, 1e-3)
    layout, stage = rig.model.layout, rig.groups.coordinates.pipeline
    predicted = communicators(layout, stage, tied_stages(layout))
    return Counter(used.sizes.values()), Counter(
        (c.ring, c.near + c.far > 0) for c in predicted if c.name != "pair of stages"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_groups_that_a_step_uses_are_counted(layout: str) -> None:
    values = tiny_values(*LAYOUTS[layout], "collectives.pairwise=false")
    for used, predicted in run_ranks(use, 4, values):
        assert used == predicted


def start(world: World, values: dict[str, Any]) -> tuple[Counter[int], Counter[int]]:
    """Return the sizes of the groups that preflight tests, and of the groups that are counted."""
    install()
    groups.shared_groups = nullcontext
    connect.init_process_group = lambda *_: None  # run_ranks has done it
    tested: list[int] = []
    all_reduce = dist.all_reduce

    def note(tensor: Any, *, group: Any, async_op: bool) -> Any:
        tested.append(group.size())
        return all_reduce(tensor, group=group, async_op=async_op)

    dist.all_reduce = note
    config = RunConfig.model_validate(values)
    layout = ResolvedLayout.resolve(config, world.size, world.ranks_per_node)
    store = dist.distributed_c10d._get_default_store()
    made, _ = connect.connect(config, layout, world, store, Accelerator.of_rank(0))
    counted = communicators(layout, made.coordinates.pipeline, tied_stages(layout))
    return Counter(tested), Counter(c.ring for c in counted if c.name != "pair of stages")


@pytest.mark.parametrize("layout", ["replicas", "tied pipeline", "pipeline", "three digits"])
def test_preflight_makes_no_communicator_that_the_run_does_not_need(layout: str) -> None:
    for tested, counted in run_ranks(start, 4, tiny_values(*LAYOUTS[layout])):
        assert tested == counted
