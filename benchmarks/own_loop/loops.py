"""The training loops of bench_library.py: one with frontier_llm.library, and one with FSDP2.

Both train a Llama of transformers with random weights, shard all states over all ranks, with one
unit per layer and one for the rest of the model, keep fp32 master weights, clip the norm of the
gradient, and update with a fused AdamW kernel that decays matrices only.

In bf16 both compute in bf16, gather parameters in bf16 and send gradients in bf16. The library sums
gradients in fp32. FSDP2 (reduce_dtype) sums them in bf16, and then converts the sum to fp32.
"""

import importlib
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from frontier_llm.errors import ConfigError
from frontier_llm.library import AdamW, Formats, Sharded, shard

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

Precision = Literal["fp32", "bf16"]
SEED = 1
RATE = 1e-3
"""Learning rate."""
UPDATE = AdamW()


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


@dataclass(frozen=True)
class Shape:
    """Dimensions of the model and of the samples."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    """Tokens per sample."""
    samples: int
    """Samples per rank and step."""


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


def tokens_of(shape: Shape, rank: int, ranks: int, step: int) -> torch.Tensor:
    """Return [samples, sequence] int64: random tokens that depend on the rank and the step only."""
    generator = torch.Generator().manual_seed(SEED + step * ranks + rank)
    size = (shape.samples, shape.sequence)
    return torch.randint(shape.vocabulary, size, generator=generator)


class Loop(Protocol):
    """One rank of a contender."""

    def step(self, tokens: torch.Tensor) -> float:
        """Run one step on [samples, sequence] int64; return the mean loss. Collective."""

    def counted_bytes(self) -> float | None:
        """Return the bytes sent since the last call; None if the library does not count them."""

    def settle(self) -> None:
        """Wait for all messages under way. Collective over all ranks."""


class LibraryLoop:
    """`frontier_llm.library.shard` with p = g = o = all ranks."""

    def __init__(self, shape: Shape, precision: Precision) -> None:
        model = build(shape)
        if precision == "bf16":
            for parameter in model.parameters():  # not the buffers, which FSDP2 leaves in fp32
                parameter.data = parameter.data.bfloat16()
        ranks = dist.get_world_size()
        formats = Formats.BF16 if precision == "bf16" else Formats.PLAIN
        self.states: Sharded = shard(
            model, params=ranks, grads=ranks, optimizer=ranks, formats=formats, update=UPDATE
        )
        self._model = model

    def step(self, tokens: torch.Tensor, *, saved: bool = False) -> float:
        """Run one step; see `Loop`. `saved`: whether the states are saved after it."""
        loss = self._model(input_ids=tokens, labels=tokens).loss
        self.states.backward(loss)
        self.states.step(RATE, saved=saved)
        return loss.item()

    def counted_bytes(self) -> float | None:
        """Return the bytes that this rank has sent since the last call."""
        return sum(sent.total for sent in self.states.sent_bytes().values())

    def settle(self) -> None:
        """Wait for all messages under way. Collective over all ranks."""
        self.states.settle()


class FsdpLoop:
    """torch's FSDP2.

    With `keeps`, parameters stay gathered between a layer's forward and backward pass. With
    `prefetches`, each layer starts to gather the next one. By default, FSDP2 prefetches only with
    CUDA streams; on a CPU a layer is gathered when it is needed.
    """

    def __init__(
        self, shape: Shape, precision: Precision, *, keeps: bool = False, prefetches: bool = False
    ) -> None:
        model = build(shape)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        dtype = torch.bfloat16 if precision == "bf16" else None  # None: that of the parameters
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not keeps)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        if prefetches:
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

    def update(self) -> None:
        """Clip the gradients and update the parameters."""
        assert UPDATE.clip_norm is not None
        nn.utils.clip_grad_norm_(self.model.parameters(), UPDATE.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, tokens: torch.Tensor) -> float:
        """Run one step; see `Loop`."""
        loss = self.passes(tokens)
        self.update()
        return loss

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


CONTENDERS = ("library", "fsdp2", "fsdp2-prefetch", "fsdp2-keep")
"""Names of the contenders."""


def make(name: str, shape: Shape, precision: Precision) -> Loop:
    """Build one rank of a contender. Collective over all ranks."""
    if name == "library":
        return LibraryLoop(shape, precision)
    keeps, prefetches = name == "fsdp2-keep", name == "fsdp2-prefetch"
    return FsdpLoop(shape, precision, keeps=keeps, prefetches=prefetches)
