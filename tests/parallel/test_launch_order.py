"""All ranks launch their collectives and messages in one order, and none is a first one.

Then nothing hangs, whatever the streams and queues of a device are, and NCCL_LAUNCH_ORDER_IMPLICIT
is safe. The second part is an account of communicators: those that are created when ranks connect
are those that a run uses and those that the planner counts.
"""

import json
import os
import signal
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from frontier_llm.cli.main import main
from frontier_llm.config.run import RunConfig
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.geometry.communicators import tied_stages, used_groups
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.launch.world import World
from frontier_llm.parallel import groups
from frontier_llm.parallel.megatron_cpu import install
from frontier_llm.recovery.survivor import lend
from frontier_llm.trainer import connect
from frontier_llm.trainer.callbacks.callback import Callback
from frontier_llm.trainer.sample import Sampler
from tests.covering import covering
from tests.forked_train import TINY, run
from tests.parallel.device_model import Device, simulate
from tests.parallel.launch_record import Event, events, operations, processes, recording
from tests.ranks import run_ranks
from tests.texts import prose
from tests.trainer.evaluation import EvaluationLoader, evaluation
from tests.trainer.rig import make_rig
from tests.values import THREE_LEVELS, TINY_T5, tiny_values

pytestmark = pytest.mark.slow

PIPELINE = ("parallel.pipeline=4", "model.layers=8", "parallel.tensor=2")
IN_3D = ("parallel.pipeline=2", "parallel.tensor=2", "parallel.sequence=true")
QUANTISED = ("collectives.block_elements=32",)
LAYOUTS: dict[str, tuple[str, ...]] = {
    "replicas": ("sharding=replicated",),
    "1f1b": (*PIPELINE, "parallel.schedule=1f1b"),
    "interleaved": (*PIPELINE, "parallel.schedule=interleaved", "parallel.chunks=2"),
    "zb_h1": (*PIPELINE, "parallel.schedule=zb_h1", "model.tied=true"),
    "zb_v": (*PIPELINE, "parallel.schedule=zb_v", "parallel.chunks=2", "sharding=zero3"),
    "v_half": (*PIPELINE, "parallel.schedule=v_half", "parallel.chunks=2"),
    "three stages": ("parallel.pipeline=3", "model.layers=6", "model.tied=true"),
    "three stages folded": (
        "parallel.pipeline=3", "model.layers=6", "parallel.schedule=zb_v", "parallel.chunks=2",
        "sharding=zero1",
    ),
    "two stages interleaved": (
        "parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.chunks=2",
        "model.tied=true",
    ),
    "tensor": ("parallel.tensor=4", "sharding=zero1"),
    "tensor and sequence": (
        "parallel.tensor=4", "parallel.sequence=true", "sharding=zero3", "model.layers=2",
    ),
    "zero1": ("sharding=zero1",),
    "zero2": ("sharding=zero2", *IN_3D),
    "zero3": ("sharding=zero3", *IN_3D, "model.tied=true"),
    "mics": ("sharding=mics", "parallel.tensor=2"),
    "three factors": ("sharding.params=2", "sharding.grads=4", "sharding.optimizer=8"),
    "zeropp": ("sharding=zeropp", "collectives=zeropp", *QUANTISED),
    "zeropp in 3D": ("sharding=zero3", "collectives=zeropp", *QUANTISED, *IN_3D),
    "four bits": ("sharding=zero3", "collectives=four_bits"),
    "quantised replicas": (
        "sharding.params=1", "sharding.grads=2", "sharding.optimizer=2", "collectives=zeropp",
        *QUANTISED,
    ),
    "levels": ("sharding=levels", "collectives=levels", *THREE_LEVELS),
    "gradients in bf16": ("sharding=zero3", "collectives.grads_format=bf16"),
    "llama": (
        "model=llama_7b", "model.kv_heads=2", "model.ffn=64", "sharding=zero3",
        "recompute=selective",
    ),
    "parallel residual": ("model.residual=parallel", "sharding=zero2"),
    "t5 recomputed": (*TINY_T5, "recompute=full", "sharding=zero2"),
    "t5 with flex": (
        *TINY_T5, "parallel.pipeline=2", "recompute=full", "attention=flex",
    ),
    "muon": ("optimizer=muon", "sharding=zero2", "parallel.pipeline=2"),
    "recomputed": ("recompute=full", "sharding=zero3", *IN_3D),
    "t5": (*TINY_T5, "parallel.pipeline=2", "parallel.tensor=2"),
    "t5 in parts": (*TINY_T5, "parallel.tensor=2", "parallel.sequence=true", "sharding=zero3"),
    "t5 over four stages": (*TINY_T5, "parallel.pipeline=4", "model.layers=2", "sharding=zero2"),
    "few": (
        "parallel.pipeline=4", "parallel.tensor=2", "model.tied=true",
        "collectives.communicators=few",
    ),
    "context": (
        "parallel.context=2", "parallel.pipeline=2", "parallel.schedule=zb_h1", "sharding=zero3",
    ),
    "context, few": (
        "parallel.context=2", "parallel.tensor=2", "parallel.sequence=true", "recompute=full",
        "collectives.communicators=few",
    ),
    "one, of replicas": ("sharding=zero2", "collectives.communicators=one"),
}  # fmt: skip
COVERED = (
    "1f1b", "v_half", "three stages folded", "tensor", "zero1", "zero2", "three factors",
    "zeropp", "four bits",
    "gradients in bf16", "t5 in parts", "quantised replicas", "recomputed", "t5", "zb_h1",
    "mics", "replicas", "llama", "parallel residual", "t5 recomputed", "t5 with flex",
    "interleaved", "tensor and sequence", "zero3", "two stages interleaved",
    "t5 over four stages", "context", "muon", "few", "levels", "one, of replicas",
    "zb_v",
)  # fmt: skip
ON_GPU = ("collectives.pairwise=false",)


class Letters:
    """A tokenizer."""

    vocabulary, eod = 100, 0

    def sentinels(self, count: int) -> list[int]:
        return [90 - k for k in range(count)]

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 64 for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


def as_with_nccl(communicators: str) -> bool:
    return communicators != "many"


def use(world: World, values: dict[str, Any], folder: Path) -> list[tuple[int, int]]:
    """Connect, then do everything that a run does with other ranks; return what is counted."""
    install()
    connect.init_process_group = lambda *_: None  # run_ranks has done it
    groups._shares_world = as_with_nccl
    config = RunConfig.model_validate(values)
    layout = ResolvedLayout.resolve(
        config, world.size, world.ranks_per_node, precision="fp32", check_rules=False
    )
    store = dist.PrefixStore(folder.name, dist.distributed_c10d._get_default_store())
    with recording(folder) as recorder:
        connected = connect.connect(config, layout, world, store, Accelerator.of_rank(0))
        rig = make_rig(world, values, connected=connected)
        evaluation(rig, EvaluationLoader(rig)).run()
        rig.train(2)
        Sampler(rig.model, rig.groups, config, Letters()).continue_texts(["a"], 1, 0.0, 1)
        rig.states.settle()
        recorder.write(Event("finished"))
        if layout.factors.optimizer == 1 and layout.grid.data == world.size:
            lend(rig.states, None, {world.size - 1: 0})
    return [
        (used.ring, used.near + used.far)
        for used in used_groups(layout, rig.groups.coordinates.pipeline, tied_stages(layout))
    ]


def traffic(listed: Sequence[Event], rank: int) -> dict[str, tuple[int, set[int]]]:
    """Return by group: the ranks of its rings, and those that exchange messages with this one."""
    found: dict[str, tuple[int, set[int]]] = {}
    for event in listed:
        if not event.ranks:
            continue
        ring, others = found.get(event.group, (1, set()))
        if event.kind == "ring":
            ring = len(event.ranks)
        elif event.kind == "exchange":
            others = others | {*event.ranks} - {rank}
        else:
            others = others | {peer for peer, _ in event.peers}
        found[event.group] = ring, others
    return found


def until(listed: Sequence[Event], mark: str) -> int:
    return next(number for number, event in enumerate(listed) if event.kind == mark)


def check(counted: Sequence[Sequence[tuple[int, int]]], recorded: dict[int, list[Event]]) -> None:
    """Check the order of all launches, and the account of communicators."""
    assert sorted(recorded) == list(range(len(counted)))
    assert simulate(operations(recorded), Device(in_order=True)).waiting == {}
    for rank, listed in recorded.items():
        connecting, connected, finished = (
            until(listed, mark) for mark in ("connecting", "connected", "finished")
        )
        created = traffic(listed[connecting:connected], rank)
        assert created == traffic(listed[connected:finished], rank)
        # states are lent, after ranks were replaced, in the communicator of all ranks
        assert {event.ranks for event in listed[finished + 1 :]} <= {tuple(range(len(counted)))}
        sizes = Counter((ring, len(others)) for ring, others in created.values())
        assert sizes == Counter(counted[rank])


@pytest.mark.parametrize("name", covering(LAYOUTS, COVERED))
def test_all_ranks_launch_in_one_order_what_was_created_before(name: str, tmp_path: Path) -> None:
    ranks = {"three stages": 6, "three stages folded": 6, "context, few": 4}.get(name, 8)
    values = tiny_values(*LAYOUTS[name], f"data.global_batch={2 * ranks}", *ON_GPU)
    counted = run_ranks(use, ranks, values, tmp_path, timeout=120, ranks_per_node=ranks // 2)
    check(counted, events(tmp_path))


def _without_creation(listed: Sequence[Event], rank: int) -> set[str]:
    """Return the groups that a process has used without having used them when it connected."""
    created: dict[str, tuple[int, set[int]]] = {}
    missing = set()
    for number, event in enumerate(listed):
        if event.kind == "connecting":
            end = number + until(listed[number:], "connected")
            created = traffic(listed[number:end], rank)
        elif event.ranks and event.group not in created:
            missing.add(event.group)
    return missing


RUN = (
    *TINY, "model.layers=4", "launch.ranks=4", "parallel.pipeline=2", "sharding=zero1",
    "trainer.steps=6", "trainer.evaluate_every_steps=2", "trainer.sample_tokens=2",
    "checkpoint.every_steps=2",
)  # fmt: skip
RECORDED = {
    "started and resumed": (
        ("trainer.steps=4",), ("trainer.steps=6", "run.allow_changes=[trainer]"),
    ),
    "interleaved": (("parallel.schedule=interleaved", "parallel.chunks=2"),),
    "rewound": (
        ("trainer.steps=60", "trainer.spike_factor=1.0001", "trainer.spike_window=1",
         "trainer.rewinds_allowed=1"),
    ),
    "replaced": (
        ("recovery.enabled=true", "run.resume=never", "sharding=replicated",
         "callbacks=[tests.parallel.test_launch_order:Dies]"),
    ),
}  # fmt: skip


class Dies(Callback):
    """Kills the first process of rank 1."""

    def on_step_begin(self, step: int) -> None:
        started = (Path(self.context.config.run.dir) / "ranks.jsonl").read_text().splitlines()
        is_first = [json.loads(line)["rank"] for line in started].count(1) == 1
        if step == 3 and self.context.world.rank == 1 and is_first:
            os.kill(os.getpid(), signal.SIGKILL)


def use_without(world: World, values: dict[str, Any], folder: Path, left_out: str) -> Any:
    """As `use`, but some groups or connections are not used when the ranks connect."""
    first_uses = connect.first_uses
    connect.first_uses = lambda *arguments: (
        trial for trial in first_uses(*arguments) if not trial.name.startswith(left_out)
    )
    return use(world, values, folder)


@pytest.mark.parametrize(
    "left_out",
    covering(["stages ", "tensor", "all ranks", "params"], ["tensor", "all ranks", "params"]),
)
def test_what_is_not_used_at_the_start_is_found(left_out: str, tmp_path: Path) -> None:
    used_by = {"params": "zero3", "stages ": "two stages interleaved"}
    layout = LAYOUTS[used_by.get(left_out, "interleaved")]
    values = tiny_values(*layout, "data.global_batch=16", *ON_GPU)
    counted = run_ranks(use_without, 8, values, tmp_path, left_out, ranks_per_node=4)
    with pytest.raises(AssertionError):
        check(counted, events(tmp_path))


def use_lanes(world: World, values: dict[str, Any]) -> list[bool]:
    """Connect as with NCCL; return whether collectives use a lane before, then, and at the end."""
    install()
    connect.init_process_group = lambda *_: None
    connect.choose_backend = lambda *_: "nccl"
    torch.cuda.Stream = lambda *_: None
    config = RunConfig.model_validate(values)
    layout = ResolvedLayout.resolve(config, world.size, world.ranks_per_node, check_rules=False)
    store, original = dist.distributed_c10d._get_default_store(), dist.all_reduce
    found = [dist.all_reduce is not original]
    connect.connect(config, layout, world, store, Accelerator.of_rank(0))
    found.append(dist.all_reduce is not original)
    groups.leave_lane()
    return [*found, dist.all_reduce is not original]


@pytest.mark.parametrize(("count", "uses"), [("many", False), ("few", True), ("one", True)])
def test_ranks_use_a_lane_with_few_communicators(count: str, uses: bool) -> None:
    values = tiny_values(f"collectives.communicators={count}")
    assert run_ranks(use_lanes, 2, values) == [[False, uses, False]] * 2


@pytest.mark.parametrize("name", covering(RECORDED, ("interleaved", "rewound", "replaced")))
def test_a_whole_run_uses_only_what_was_created_when_it_connected(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text(prose(40))
    folder = tmp_path / "record"
    folder.mkdir()
    where = (f"data.path={tmp_path}/text.txt", f"data.directory={tmp_path}/prepared",
             f"run.dir={tmp_path}/run")  # fmt: skip

    def start(overrides: Sequence[str]) -> int:
        with recording(folder):
            return main(["train", *RUN, *where, *overrides])

    for overrides in RECORDED[name]:
        ended = run(partial(start, overrides))
        assert ended.code == (1 if name == "rewound" else 0), ended.text
    of_processes = processes(folder)
    assert len(of_processes) == 4 * len(RECORDED[name]) + (name == "replaced")
    for rank, listed in of_processes:
        kinds = Counter(event.kind for event in listed)
        assert kinds["connected"] == (2 if name == "replaced" and rank != 1 else 1)
        assert kinds["messages"] > 10
        assert _without_creation(listed, rank) == set()


def test_opposite_orders_are_found() -> None:
    first, second = Event("ring", "a", (0, 1)), Event("ring", "b", (0, 1))
    same = {0: [first, second], 1: [first, second]}
    assert simulate(operations(same), Device(in_order=True)).waiting == {}
    opposite = {0: [first, second], 1: [second, first]}
    assert simulate(operations(opposite), Device(in_order=True)).waiting.keys() == {0, 1}
