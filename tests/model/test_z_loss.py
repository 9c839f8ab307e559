"""Z-loss in the cross entropy that tensor ranks share, and in runs of every layout."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from frontier_llm.launch.world import World
from frontier_llm.model import loss
from frontier_llm.model.loss import token_losses
from tests.covering import covering, exhaustive
from tests.model.test_loss import inputs
from tests.ranks import run_ranks
from tests.trainer.rig import make_rig
from tests.trainer.test_parity import BATCH, LAYOUTS, MODELS, compare, reference
from tests.values import TINY_T5, tiny_values

VOCABULARY = 40
Z_LOSS = "optimizer.z_loss=0.3"
"""Large enough that an error of z-loss is an error of the gradient."""


def parts_and_gradient(world: World, width: int, dtype: torch.dtype, parts: str) -> Any:
    """Return both results, and the gradient of random multiples of the named ones."""
    whole, labels, grads = inputs(VOCABULARY, dtype)
    padded = F.pad(whole, (0, width * world.size - VOCABULARY), value=50.0)
    own = padded[..., world.rank * width : (world.rank + 1) * width].clone().requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    losses = token_losses(own * 1.0, labels, VOCABULARY, group)
    weighted(losses.cross_entropy, losses.log_divisor, grads, parts).backward()
    return losses.cross_entropy.detach(), losses.log_divisor.detach(), own.grad


def weighted(
    cross_entropy: torch.Tensor, log_divisor: torch.Tensor, grads: torch.Tensor, parts: str
) -> torch.Tensor:
    terms = {"c": (cross_entropy * grads).sum(), "z": (log_divisor.square() * grads.flip(0)).sum()}
    return torch.stack([terms[part] for part in parts]).sum()


@pytest.mark.parametrize(
    "chunk_bytes", [4 * 40, loss.CPU_LOSS_CHUNK_BYTES], ids=["one_token", "all"]
)
@pytest.mark.parametrize("parts", ["cz", "z"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "width"), [(1, 48), (2, 24), (3, 20)])
def test_losses_and_gradients_are_those_of_torch(
    ranks: int,
    width: int,
    dtype: torch.dtype,
    parts: str,
    chunk_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss, "CPU_LOSS_CHUNK_BYTES", chunk_bytes)
    logits, labels, grads = inputs(VOCABULARY, dtype)
    plain = logits.float().requires_grad_()
    expected = F.cross_entropy(plain.permute(1, 2, 0), labels, reduction="none")
    log_divisor = plain.logsumexp(-1).T
    weighted(expected, log_divisor, grads, parts).backward()

    results = run_ranks(parts_and_gradient, ranks, width, dtype, parts)
    gradient = torch.cat([own for _, _, own in results], dim=-1)
    assert not gradient[..., VOCABULARY:].any()
    exact = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(gradient[..., :VOCABULARY].float(), plain.grad, **exact)
    for cross_entropy, found, _ in results:
        torch.testing.assert_close(cross_entropy, expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found, log_divisor.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        *exhaustive(
            ("tensor2_sequence", "tied_gelu"),
            ("pipeline2_chunks2", "tied_gelu"),
            ("tensor2", "untied_gqa_swiglu"),
        ),
        ("tensor2_pipeline2_data2", "tied_gelu"),
    ],
)
@pytest.mark.parametrize("sharding", covering(["replicated", "zero3"], ["replicated"]))
def test_layout_equals_one_process(layout: str, model: str, sharding: str) -> None:
    size, overrides = LAYOUTS[layout]
    compare(size, [*overrides, *BATCH, f"sharding={sharding}", Z_LOSS], MODELS[model])


@pytest.mark.slow
def test_an_encoder_decoder_equals_one_process() -> None:
    model = [*TINY_T5, "data.micro_batch=2", *BATCH]
    compare(4, ["parallel.tensor=2", "parallel.pipeline=2", Z_LOSS], model)


def train(world: World, values: dict[str, Any], precision: str = "fp32") -> list[Any]:
    return [(r.loss, r.z_loss, r.grad_norm) for r in make_rig(world, values, precision).train(3)]


@pytest.mark.slow
def test_z_loss_is_a_metric_apart_from_the_loss() -> None:
    """The first loss is that without z-loss. It is near ln v, where log Z is, too."""
    alone = run_ranks(train, 1, tiny_values(*BATCH, Z_LOSS))[0]
    assert alone[0][0] == reference(tuple(BATCH))[0][0]
    assert alone[0][1] == pytest.approx(0.3 * math.log(128) ** 2, rel=0.1)
    size, overrides = LAYOUTS["tensor2_pipeline2_data2"]
    for rank in run_ranks(train, size, tiny_values(*BATCH, Z_LOSS, *overrides)):
        np.testing.assert_allclose(rank, alone, rtol=1e-5)


@pytest.mark.slow
def test_z_loss_makes_log_z_smaller() -> None:
    small = tiny_values(*BATCH, "optimizer.z_loss=1e-6", "trainer.steps=3")
    large = tiny_values(*BATCH, "optimizer.z_loss=1.0", "trainer.steps=3")
    without, with_z = (run_ranks(train, 1, values)[0] for values in (small, large))
    assert with_z[-1][1] < 0.95 * with_z[0][1]
    assert without[-1][1] > 0.97 * without[0][1]


@pytest.mark.slow
def test_without_z_loss_there_is_no_metric() -> None:
    assert [z for _, z, _ in run_ranks(train, 1, tiny_values(*BATCH))[0]] == [None] * 3
