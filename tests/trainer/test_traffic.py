"""Counted bytes are the bytes of the calls that torch.distributed really gets."""

import functools
from collections import defaultdict
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from frontier_llm.collectives.traffic import Traffic
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.wire import all_reduce_bytes, gather_bytes, ring_sent
from frontier_llm.launch.world import World
from tests.covering import covering
from tests.ranks import in_turn, run_ranks
from tests.trainer.rig import make_rig
from tests.values import GEMMA3, SIDES, T5GEMMA, T5GEMMA2, TINY_T5, tiny_values

pytestmark = pytest.mark.slow


class SeenCalls(TorchDispatchMode):
    """Sums the ring volume of every c10d operator, by the group it is called on."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_by_group: defaultdict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if func.namespace == "c10d":
            self._count(name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        place = 1 if name in ("allreduce_", "send", "recv_") else 2
        group = dist.ProcessGroup.unbox(args[place])
        ranks = group.size()

        def volume(tensors: Any) -> float:
            flat = tensors if isinstance(tensors, list | tuple) else [tensors]
            return sum(t.numel() * t.element_size() for t in flat)

        if name == "allreduce_":
            sent = all_reduce_bytes(volume(args[0]), ranks)
        elif name in ("_allgather_base_", "allgather_"):
            sent = gather_bytes(volume(args[0]), ranks)
        elif name in ("_reduce_scatter_base_", "reduce_scatter_"):
            sent = gather_bytes(volume(args[1]), ranks)
        elif name == "send":
            sent = volume(args[0])
        elif name == "alltoall_base_":
            sent = gather_bytes(volume(args[1]), ranks)
        elif name == "recv_":
            return
        else:
            raise AssertionError(f"unexpected collective {name}")
        self.bytes_by_group["sends" if name == "send" else group.group_name] += sent


LAYOUTS = {
    "tensor": ["parallel.tensor=2"],
    "sequence": ["parallel.tensor=2", "parallel.sequence=true"],
    "sequence_rotary": [
        "parallel.tensor=2", "parallel.sequence=true", "model.positions=rotary",
        "model.tied=false",
    ],
    "tensor_recompute": ["parallel.tensor=2", "recompute=full"],
    "sequence_recompute": ["parallel.tensor=2", "parallel.sequence=true", "recompute=full"],
    "norms_over_ranks": [
        "parallel.tensor=2", "model.qk_norm=width", "parallel.sequence=true", "recompute=full",
    ],
    "norms_of_heads": ["parallel.tensor=2", "model.qk_norm=head"],
    "gemma_sequence_recompute": [
        *GEMMA3, "parallel.tensor=2", "parallel.sequence=true", "recompute=full",
    ],
    "gemma_pipeline": [*GEMMA3, "parallel.tensor=2", "parallel.pipeline=2"],
    "pipeline": ["parallel.pipeline=2"],
    "chunks_tensor": ["parallel.tensor=2", "parallel.pipeline=2", "parallel.chunks=2"],
    "chunks_sequence": [
        "parallel.tensor=2", "parallel.pipeline=2", "parallel.chunks=2", "parallel.sequence=true",
    ],
    "folded": [
        "parallel.pipeline=2", "parallel.chunks=2", "parallel.schedule=zb_v", "parallel.tensor=2",
    ],
    "waiting_sequence": [
        "parallel.pipeline=2", "parallel.schedule=zb_h1", "parallel.tensor=2",
        "parallel.sequence=true",
    ],
    "data": [],
    "t5_tensor": [*TINY_T5, "parallel.tensor=2"],
    "t5_sequence_recompute": [
        *TINY_T5, "parallel.tensor=2", "parallel.sequence=true", "recompute=full",
    ],
    "t5_chunks_sequence": [
        *TINY_T5, "parallel.tensor=2", "parallel.pipeline=2", "parallel.chunks=2",
        "parallel.sequence=true", "model.layers=5",
    ],
    "t5_norms_over_ranks": [
        *TINY_T5, "parallel.tensor=2", "parallel.sequence=true", "recompute=full",
        "model.qk_norm=width", "model.norm_placement=output", "model.kv_heads=2",
    ],
    "t5gemma_sequence": [*T5GEMMA, "parallel.tensor=2", "parallel.sequence=true"],
    "t5gemma_pipeline": [*T5GEMMA, "parallel.tensor=2", "parallel.pipeline=2"],
    "t5gemma2_tensor_recompute": [*T5GEMMA2, "parallel.tensor=2", "recompute=full"],
    "t5gemma2_in_encoder": [
        *T5GEMMA2, "parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true",
        "parallel.layers_per_stage=[1,3]",
    ],
    "t5gemma2_in_decoder": [*T5GEMMA2, "parallel.pipeline=2", "parallel.layers_per_stage=[3,1]"],
    "sides_in_encoder": [
        *SIDES, "parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true",
        "parallel.layers_per_stage=[1,3]",
    ],
    "sides_chunks": [*SIDES, "parallel.tensor=2", "parallel.pipeline=2", "parallel.chunks=2"],
    "sides_in_decoder": [*SIDES, "parallel.pipeline=2", "parallel.layers_per_stage=[3,1]"],
    "t5_tied": [
        *TINY_T5, "parallel.tensor=2", "parallel.pipeline=2", "model.tied=true",
        "model.positions=rotary",
    ],
}  # fmt: skip


def count(world: World, values: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    rig = make_rig(world, values)
    batches = rig.batches(0)
    names = {
        rig.groups.tensor.group_name: "tensor",
        "sends": "pipeline",
        rig.groups.data.group_name: "data",
        dist.group.WORLD.group_name: "world",
    }
    if rig.groups.embedding is not None and rig.groups.grid.pipeline > 1:
        names[rig.groups.embedding.group_name] = "embedding"
    taken: dict[str, Any] = {}
    take = rig.traffic.take
    rig.traffic.take = lambda: taken.setdefault("sent", take())  # type: ignore[method-assign]
    with SeenCalls() as seen:
        rig.step.run(1, batches, 1e-3)
    counted = {name: sent.total for name, sent in taken["sent"].items()}
    return {names[g]: b for g, b in seen.bytes_by_group.items()}, counted


COVERED = (
    "tensor", "sequence", "sequence_recompute", "chunks_tensor", "pipeline", "waiting_sequence",
    "t5_tensor", "t5_sequence_recompute", "sequence_rotary", "tensor_recompute", "norms_of_heads",
    "gemma_pipeline", "t5_norms_over_ranks", "t5gemma_pipeline", "t5gemma2_in_decoder",
    "sides_in_decoder", "t5gemma_sequence", "sides_chunks", "gemma_sequence_recompute",
    "t5_tied", "folded",
)  # fmt: skip
"""Layouts whose settings others have, alone or with another model; of unequal sides, the border in
the encoder always runs."""


def size_of(layout: str) -> int:
    overrides = str(LAYOUTS[layout])
    return 4 if "pipeline=2" in overrides and "tensor=2" in overrides else 2


@functools.cache
def counts(size: int, are_covered: bool) -> dict[str, list[Any]]:
    """Train the layouts of this size that always run, or the others, on one set of ranks."""
    names = [n for n in LAYOUTS if size_of(n) == size and (n in COVERED) == are_covered]
    by_rank = run_ranks(in_turn, size, count, [(tiny_values(*LAYOUTS[n]),) for n in names])
    return dict(zip(names, map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.parametrize("layout", covering(LAYOUTS, COVERED))
def test_counted_bytes_are_sent_bytes(layout: str) -> None:
    for seen, counted in counts(size_of(layout), layout in COVERED)[layout]:
        # sequence-parallel norms, and those of heads, are added up over the tensor group by us
        assert seen.get("tensor", 0) == counted["tensor"] + counted.get("sequence_norms", 0)
        assert seen.get("pipeline", 0) == counted["pipeline"]
        assert seen.get("data", 0) == counted.get("reduce_states", 0)
        assert seen.get("embedding", 0) == counted.get("tied_copies", 0)


def test_bytes_are_attributed_to_links() -> None:
    grid = Grid(tensor=2, data=2, pipeline=2, ranks_per_node=4)
    traffic = Traffic(grid, rank=3)
    traffic.count(ring_sent, "tensor", grid.tensor_group(3), 10.0)  # 2, 3: one node
    traffic.count(ring_sent, "pipeline", grid.pipeline_group(3), 7.0)  # 3, 7: two nodes
    sent = traffic.take()
    assert (sent["tensor"].node, sent["tensor"].network) == (10.0, 0.0)
    assert (sent["pipeline"].node, sent["pipeline"].network) == (0.0, 7.0)
    assert traffic.take() == {}
