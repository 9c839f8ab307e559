"""One rank of bench_library.py: training loops with frontier_llm.library and with FSDP2.

Both train a Llama of transformers with random weights, shard all states over all ranks, with one
unit per layer and one for the rest of the model, keep fp32 master weights, clip the norm of the
gradient, and update with a fused AdamW kernel that decays matrices only.

In bf16 both compute in bf16, gather parameters in bf16 and send gradients in bf16. The library sums
gradients in fp32. FSDP2 (reduce_dtype) sums them in bf16, and then converts the sum to fp32.

The savers are the library's lazy checkpoints, which a thread writes, and torch.distributed
.checkpoint (DCP) of the FSDP2 model and its optimizer, in the same number of bytes.
"""

import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from benchmarks.checkpoint.savers import Dcp, DcpMode, Place
from benchmarks.peers.torch_peers import shard_layers
from benchmarks.peers.turn import Precision
from benchmarks.testbed.sent_counter import tcp_sent_bytes
from benchmarks.testbed.shape import Shape
from frontier_lab.calibration.foreign_load import busy_seconds, idle_share
from frontier_llm.device.accelerator import keep_freed_memory
from frontier_llm.errors import ConfigError
from frontier_llm.library import AdamW, Checkpoints, Formats, Sharded, shard
from frontier_llm.protocols import StateShard

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

SEED = 1
RATE = 1e-3
"""Learning rate."""
UPDATE = AdamW()
CONTENDERS = ("library", "fsdp2", "fsdp2-prefetch", "fsdp2-keep")
_DCP_MODES: dict[str, DcpMode] = {
    "dcp-save": "save",
    "dcp-async": "async",
    "dcp-async-stager": "async-stager",
}
SAVERS = ("library", *_DCP_MODES)


@dataclass(frozen=True)
class Setting:
    """Settings of a turn that are the same for all contenders."""

    shape: Shape
    samples: int
    """Samples per rank and step."""
    precision: Precision
    threads: int
    """CPU threads per rank."""
    warmup: int
    """Steps before the timed ones."""
    timed: int
    every: int
    """Steps from one save to the next; only for a turn with saves."""

    def batches(self, rank: int, steps: int) -> list[torch.Tensor]:
        """Return [samples, sequence] int64 per step: tokens that depend on rank and step only."""
        size, ranks = (self.samples, self.shape.sequence), dist.get_world_size()
        seeds = (SEED + step * ranks + rank for step in range(steps))
        generators = (torch.Generator().manual_seed(seed) for seed in seeds)
        return [torch.randint(self.shape.vocabulary, size, generator=one) for one in generators]


def import_model() -> None:
    """Import the model's module once, before ranks are forked.

    Raises:
        ConfigError: transformers is not installed.
    """
    try:
        importlib.import_module("transformers.models.llama.modeling_llama")
    except ImportError as error:
        raise ConfigError(
            "transformers", str(error), "the library of the model",
            "pip install -e '.[convert]'",
        ) from error  # fmt: skip


def build(shape: Shape) -> "LlamaForCausalLM":
    """Return the model in training mode, fp32, with the same weights on every rank.

    All weights are representable in bf16, so that a contender with bf16 parameters starts with the
    same values. The table of the tokens and the output layer are two parameters.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 11 // 4,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // 2,
        max_position_embeddings=shape.sequence,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


class LibraryLoop:
    """`frontier_llm.library.shard` with p = g = o = all ranks."""

    def __init__(self, setting: Setting) -> None:
        model, ranks, formats = build(setting.shape), dist.get_world_size(), Formats.PLAIN
        if setting.precision == "bf16":
            formats = Formats.BF16
            for parameter in model.parameters():  # not the buffers, which FSDP2 leaves in fp32
                parameter.data = parameter.data.bfloat16()
        self.states: Sharded = shard(
            model, params=ranks, grads=ranks, optimizer=ranks, formats=formats, update=UPDATE
        )
        self._model = model

    def passes(self, tokens: torch.Tensor) -> float:
        """Run the forward and the backward pass; return the loss."""
        loss = self._model(input_ids=tokens, labels=tokens).loss
        self.states.backward(loss)
        return loss.item()

    def update(self, *, saved: bool = False) -> None:
        """Clip the gradients and update; `saved`: whether the states are saved after it."""
        self.states.step(RATE, saved=saved)

    def counted_bytes(self) -> float | None:
        """Return the bytes that this rank has sent since the last call."""
        return sum(sent.total for sent in self.states.sent_bytes().values())

    def settle(self) -> None:
        """Wait for all messages under way. Collective over all ranks."""
        self.states.settle()


class FsdpLoop:
    """torch's FSDP2.

    With `fsdp2-keep`, parameters stay gathered between a layer's forward and backward pass. With
    `fsdp2-prefetch`, each layer starts to gather the next one. By default, FSDP2 prefetches only
    with CUDA streams; on a CPU a layer is gathered when it is needed.
    """

    def __init__(self, setting: Setting, name: str) -> None:
        model = build(setting.shape)
        shard_layers(model, model.model.layers, setting.precision, keep=name == "fsdp2-keep")
        if name == "fsdp2-prefetch":
            _prefetch(model)
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": UPDATE.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        betas = (UPDATE.beta1, UPDATE.beta2)
        self.optimizer = torch.optim.AdamW(
            groups, RATE, betas=betas, eps=UPDATE.epsilon, fused=True
        )
        self.model = model

    def passes(self, tokens: torch.Tensor) -> float:
        """Run the forward and the backward pass; return the loss."""
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.item()

    def update(self, *, saved: bool = False) -> None:
        """Clip the gradients and update the parameters."""
        assert UPDATE.clip_norm is not None
        nn.utils.clip_grad_norm_(self.model.parameters(), UPDATE.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def counted_bytes(self) -> float | None:
        """Return None: torch counts no bytes."""
        return None

    def settle(self) -> None:
        """Do nothing: a step of FSDP2 leaves no messages under way."""


def _prefetch(model: Any) -> None:
    """Gather each layer while the previous one computes, in the forward and the backward pass."""
    layers = list(model.model.layers)
    for module in (model, *layers):
        module._set_unshard_async_op(True)  # otherwise the CPU waits for each gather that it starts
    for before, after in pairwise([model, *layers]):
        before.set_modules_to_forward_prefetch([after])
    for before, after in pairwise([model, *reversed(layers)]):
        before.set_modules_to_backward_prefetch([after])


class LibrarySaver:
    """The library's lazy checkpoints, which a thread writes.

    The library counts the stall: planning, waits of the update, and copies.
    """

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.loop = LibraryLoop(setting)
        self._checkpoints = Checkpoints(folder, self.loop.states, keep=1)
        self._blocked = 0.0

    def fence(self) -> None:
        """Do nothing: the update waits for the copies of the previous save."""

    def save(self, step: int) -> None:
        """Start a checkpoint."""
        self._checkpoints.save(step)

    def settle(self) -> None:
        """Wait for the commit; this time is not counted."""
        self._blocked += self._checkpoints.take_stall_seconds()
        self._checkpoints.close()
        self._checkpoints.take_stall_seconds()

    def take_blocked_seconds(self) -> float:
        """Return for how long saves have blocked the loop since the last call."""
        blocked, self._blocked = self._blocked + self._checkpoints.take_stall_seconds(), 0.0
        return blocked

    def close(self) -> None:
        """Wait for the commit."""
        self._checkpoints.close()


class _FsdpStates:
    """The states of an FSDP2 model and its optimizer, as DCP takes them."""

    size = 0
    shards: list[StateShard] = []  # noqa: RUF012

    def __init__(self, loop: FsdpLoop) -> None:
        self._loop = loop

    @property
    def tensors(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._loop.model, self._loop.optimizer)
        return {"model": model, "optimizer": optimizer}


class DcpSaver(Dcp):
    """DCP of an FSDP2 model and optimizer, which times its calls."""

    def __init__(self, setting: Setting, folder: Path, mode: DcpMode) -> None:
        self.loop, self._blocked = FsdpLoop(setting, "fsdp2"), 0.0
        place = Place(dist.get_rank(), dist.get_world_size(), dist.HashStore(), folder)
        super().__init__(_FsdpStates(self.loop), place, mode, keeps_all=True)

    def fence(self) -> None:
        """Wait for the copy."""
        self._blocked += _seconds(super().fence)

    def save(self, step: int) -> None:
        """Save, or start to; DCP allows one asynchronous save at a time."""
        self._blocked += _seconds(lambda: super(DcpSaver, self).save(step))

    def take_blocked_seconds(self) -> float:
        """Return for how long saves have blocked the loop since the last call."""
        blocked, self._blocked = self._blocked, 0.0
        return blocked


@dataclass(frozen=True)
class SpeedFigures:
    """Measurements of one rank without saves."""

    step_seconds: float
    """Mean time of the timed steps."""
    cpu_seconds: float
    """CPU time of this process per timed step, with the threads of gloo."""
    idle_share: float
    """Idle share of all cores of the machine during the timed steps."""
    losses: tuple[float, ...]
    """Losses of all steps, warm-up first."""
    sent_bytes: float | None
    """Bytes per step that this rank wrote to TCP sockets; None if they cannot be counted."""
    counted_bytes: float | None
    """Bytes of a step as the library counts them; None for other contenders."""


@dataclass(frozen=True)
class SaveFigures:
    """Measurements of one rank with saves."""

    blocked_seconds: float
    """Time per step for which a save blocked the loop: its call, the wait for copies before the
    update, and the wait for the previous save."""
    step_seconds: float
    """Time per step with saves, until the last save is complete."""
    plain_step_seconds: float
    """Time per step without saves, just before."""


def speed_turn(rank: int, name: str, setting: Setting) -> SpeedFigures:
    """Build a contender, warm up, and time some steps. Collective over all ranks."""
    _set_up(setting)
    loop = LibraryLoop(setting) if name == "library" else FsdpLoop(setting, name)
    batches, losses = setting.batches(rank, setting.warmup + setting.timed), []

    def train(steps: list[torch.Tensor]) -> None:
        for batch in steps:
            losses.append(loop.passes(batch))
            loop.update()
        loop.settle()

    train(batches[: setting.warmup])
    loop.counted_bytes()
    sent, busy, cpu = tcp_sent_bytes(), busy_seconds(), _cpu_seconds()
    seconds = _time(lambda: train(batches[setting.warmup :]))
    idle = idle_share(busy_seconds() - busy, seconds) or 0.0
    cpu, after, counted = _cpu_seconds() - cpu, tcp_sent_bytes(), loop.counted_bytes()
    return SpeedFigures(
        step_seconds=seconds / setting.timed,
        cpu_seconds=cpu / setting.timed,
        idle_share=idle,
        losses=tuple(losses),
        sent_bytes=(after.written - sent.written) / setting.timed if sent and after else None,
        counted_bytes=None if counted is None else counted / setting.timed,
    )


def save_turn(rank: int, name: str, setting: Setting, folder: Path) -> SaveFigures:
    """Time steps without saves, then as many with a save every few steps. Collective.

    The saves before are not counted, because the first one allocates memory.
    """
    _set_up(setting)
    saver = (
        LibrarySaver(setting, folder)
        if name == "library"
        else DcpSaver(setting, folder, _DCP_MODES[name])
    )
    batches, done = setting.batches(rank, setting.timed), 0

    def step(batch: torch.Tensor, is_due: bool) -> None:
        nonlocal done
        done += 1
        saver.loop.passes(batch)
        saver.fence()
        saver.loop.update(saved=is_due)
        if is_due:
            saver.save(done)

    def train(every: int | None) -> None:
        for index, batch in enumerate(batches):
            step(batch, every is not None and index % every == 0)
        saver.settle()

    for batch in batches[: setting.warmup]:
        step(batch, True)
        saver.settle()
    plain = _time(lambda: train(None))
    saver.take_blocked_seconds()
    seconds = _time(lambda: train(setting.every))
    blocked = saver.take_blocked_seconds()
    saver.close()
    return SaveFigures(*(value / setting.timed for value in (blocked, seconds, plain)))


def _set_up(setting: Setting) -> None:
    torch.set_num_threads(setting.threads)
    keep_freed_memory()


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _time(work: Callable[[], None]) -> float:
    """Return the time of `work` in seconds, from and to a barrier of all ranks: the slowest counts.

    Pending writes are on disk before.
    """
    os.sync()
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start
