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
from benchmarks.peers.turn import SEED, MicroBatch, Peer, Turn
from benchmarks.testbed.shape import Shape
from frontier_llm.device.accelerator import keep_freed_memory
from frontier_llm.errors import ConfigError
from frontier_llm.library import AdamW, Checkpoints, Formats, Sharded, shard
from frontier_llm.protocols import StateShard

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

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


class _Loop(Peer):
    """A loop whose steps have one micro-batch."""

    def passes(self, tokens: torch.Tensor) -> float:
        """Run the forward and the backward pass; return the loss."""
        raise NotImplementedError

    def update(self, *, saved: bool = False) -> None:
        """Clip the gradients and update; `saved`: whether the states are saved after it."""
        raise NotImplementedError

    def step(self, batches: list[MicroBatch]) -> float:
        """Run one step on the tokens of the only micro-batch; return the loss."""
        loss = self.passes(batches[0][0])
        self.update()
        return loss


class LibraryLoop(_Loop):
    """`frontier_llm.library.shard` with p = g = o = all ranks."""

    def __init__(self, turn: Turn) -> None:
        keep_freed_memory()
        model, ranks, formats = build(turn.shape), turn.ranks, Formats.PLAIN
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        if turn.precision == "bf16":
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


class FsdpLoop(_Loop):
    """torch's FSDP2.

    With `fsdp2-keep`, parameters stay gathered between a layer's forward and backward pass. With
    `fsdp2-prefetch`, each layer starts to gather the next one. By default, FSDP2 prefetches only
    with CUDA streams; on a CPU a layer is gathered when it is needed.
    """

    def __init__(self, turn: Turn) -> None:
        keep_freed_memory()
        self.model = model = build(turn.shape)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        keep = turn.contender == "fsdp2-keep"
        shard_layers(model, model.model.layers, turn.precision, keep=keep)
        if turn.contender == "fsdp2-prefetch":
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


def make(turn: Turn, rank: int) -> Peer:
    """Build one rank of a contender. Collective over all ranks."""
    return LibraryLoop(turn) if turn.contender == "library" else FsdpLoop(turn)


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

    def __init__(self, turn: Turn, folder: Path) -> None:
        self.loop = LibraryLoop(turn)
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

    def __init__(self, turn: Turn, folder: Path) -> None:
        self.loop, self._blocked = FsdpLoop(turn), 0.0
        place = Place(dist.get_rank(), turn.ranks, dist.HashStore(), folder)
        mode = _DCP_MODES[turn.contender]
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
class SaveFigures:
    """Measurements of one rank with saves."""

    blocked_seconds: float
    """Time per step for which a save blocked the loop: its call, the wait for copies before the
    update, and the wait for the previous save."""
    step_seconds: float
    """Time per step with saves, until the last save is complete."""
    plain_step_seconds: float
    """Time per step without saves, just before."""


def save_turn(rank: int, turn: Turn, every: int, folder: Path) -> SaveFigures:
    """Time steps without saves, then as many with a save every few steps. Collective.

    The saves before are not counted, because the first one allocates memory.
    """
    torch.set_num_threads(turn.threads)
    saver: LibrarySaver | DcpSaver
    saver = (LibrarySaver if turn.contender == "library" else DcpSaver)(turn, folder)
    batches, done = [turn.batches(rank, step)[0][0] for step in range(turn.steps)], 0

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

    for batch in batches[: turn.warmup]:
        step(batch, True)
        saver.settle()
    plain = _time(lambda: train(None))
    saver.take_blocked_seconds()
    seconds = _time(lambda: train(every))
    blocked = saver.take_blocked_seconds()
    saver.close()
    return SaveFigures(*(value / turn.steps for value in (blocked, seconds, plain)))


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
