"""DistributedDataParallel and FSDP2 of torch as contenders of bench_sharding.py."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.plain_gpt import PlainGpt
from benchmarks.peers.turn import ADAMW, CLIP_NORM, SEED, MicroBatch, Peer, Precision, Turn


def make(turn: Turn, rank: int) -> Peer:
    """Build one rank of the contender. Collective over all ranks."""
    torch.manual_seed(SEED)  # FSDP2 does not broadcast weights, so all ranks must draw the same
    model = PlainGpt(**asdict(turn.shape))
    if turn.contender == "ddp":
        return Ddp(model, turn)
    return Fsdp(model, turn, keep=turn.contender == "fsdp-keep")


class _TorchPeer(Peer):
    """Base of both peers: torch's AdamW and gradient clipping."""

    def __init__(self, model: nn.Module, parameters: int) -> None:
        self.parameters = parameters
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)

    def _update(self) -> None:
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


class Ddp(_TorchPeer):
    """DistributedDataParallel: gradients are reduced once per step, during the last backward pass.

    Gradients are sent in fp32, because torch's hook that sends bf16 does not support CPU ranks.
    """

    def __init__(self, model: PlainGpt, turn: Turn) -> None:
        self._ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._autocast = turn.precision == "bf16"
        super().__init__(self._ddp, _count(model))

    def step(self, batches: list[MicroBatch]) -> float:
        """Run one step; return the loss of this rank."""
        total = 0.0
        for index, (tokens, labels) in enumerate(batches):
            with nullcontext() if index + 1 == len(batches) else self._ddp.no_sync():
                with self._precision():
                    loss = self._ddp(tokens, labels)
                (loss / len(batches)).backward()
            total += loss.item()
        self._update()
        return total / len(batches)

    def _precision(self) -> AbstractContextManager[object]:
        """Return the context of a forward pass: autocast in bf16, nothing in fp32."""
        return torch.autocast("cpu", dtype=torch.bfloat16) if self._autocast else nullcontext()


class Fsdp(_TorchPeer):
    """FSDP2: all states sharded over all ranks, one unit per layer and one for the rest.

    Gradients are reduced after every micro-batch, which is FSDP2's default. With `keep`, parameters
    stay gathered between the forward and the backward pass of a unit.
    """

    def __init__(self, model: PlainGpt, turn: Turn, keep: bool) -> None:
        parameters = _count(model)
        shard_layers(model, model.layers, turn.precision, keep=keep)
        super().__init__(model, parameters)

    def step(self, batches: list[MicroBatch]) -> float:
        """Run one step; return the loss of this rank."""
        total = 0.0
        for tokens, labels in batches:
            loss = self._model(tokens, labels)
            (loss / len(batches)).backward()
            total += loss.item()
        self._update()
        return total / len(batches)


def shard_layers(
    model: nn.Module, layers: Iterable[nn.Module], precision: Precision, *, keep: bool
) -> None:
    """Shard a model over all ranks with FSDP2, one unit per layer and one for the rest.

    FSDP2 keeps the root gathered after the forward pass, since backward starts with it.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dtype = torch.bfloat16 if precision == "bf16" else None  # None: that of the parameters
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
