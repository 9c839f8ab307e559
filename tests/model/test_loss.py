"""The cross entropy over a padded vocabulary that tensor ranks share."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from frontier_llm.launch.world import World
from frontier_llm.model import loss
from frontier_llm.model.loss import token_losses
from tests.ranks import run_ranks

TOKENS, SAMPLES = 7, 3


def inputs(vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits [s, b, vocabulary], labels [b, s] and a gradient for each loss, [b, s]."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, SAMPLES, vocabulary, generator=generator) * 8
    labels = torch.randint(vocabulary, (SAMPLES, TOKENS), generator=generator)
    return logits.to(dtype), labels, torch.randn(SAMPLES, TOKENS, generator=generator)


def losses_and_gradient(world: World, vocabulary: int, width: int, dtype: torch.dtype) -> Any:
    """Compute the losses with `width` columns per tensor rank, of which the last are padding."""
    whole, labels, grads = inputs(vocabulary, dtype)
    padded = F.pad(whole, (0, width * world.size - vocabulary), value=50.0)
    own = padded[..., world.rank * width : (world.rank + 1) * width].clone().requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    losses = token_losses(own * 1.0, labels, vocabulary, group).cross_entropy
    losses.backward(grads)
    return losses.detach(), own.grad


@pytest.mark.parametrize(
    "chunk_bytes", [4 * 40, loss.CPU_LOSS_CHUNK_BYTES], ids=["one_token", "all"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "width"), [(1, 40), (1, 48), (2, 24), (3, 20)])
def test_losses_and_gradients_are_those_of_torch(
    ranks: int, width: int, dtype: torch.dtype, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With three ranks of 20 columns, the last rank has nothing but padding."""
    monkeypatch.setattr(loss, "CPU_LOSS_CHUNK_BYTES", chunk_bytes)
    vocabulary = 40
    logits, labels, grads = inputs(vocabulary, dtype)
    reference = logits.float().requires_grad_()
    expected = F.cross_entropy(reference.permute(1, 2, 0), labels, reduction="none")
    expected.backward(grads)

    results = run_ranks(losses_and_gradient, ranks, vocabulary, width, dtype)
    gradient = torch.cat([own for _, own in results], dim=-1)
    assert gradient.dtype == dtype
    assert not gradient[..., vocabulary:].any()
    exact = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(gradient[..., :vocabulary].float(), reference.grad, **exact)
    for losses, _ in results:
        assert losses.dtype == torch.float32
        torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [40, 24])
def test_bounded_logits_have_the_losses_and_gradients_of_their_formula(width: int) -> None:
    """Of logits up to 30, with a bound of 10; z-loss reads the bounded logits too."""
    vocabulary, bound = 40, 10.0
    logits, labels, grads = inputs(vocabulary, torch.float32)
    reference = logits.clone().requires_grad_()
    bounded = bound * torch.tanh(reference / bound)
    expected = F.cross_entropy(bounded.permute(1, 2, 0), labels, reduction="none")
    log_divisors = bounded.logsumexp(-1).t()
    torch.autograd.backward([expected, log_divisors], [grads, grads])

    def bounded_losses(world: World) -> Any:
        padded = F.pad(logits, (0, width * world.size - vocabulary), value=50.0)
        own = padded[..., world.rank * width : (world.rank + 1) * width].clone().requires_grad_()
        group = dist.group.WORLD
        assert group is not None
        losses = token_losses(own * 1.0, labels, vocabulary, group, bound)
        torch.autograd.backward(list(losses), [grads, grads])
        return losses.cross_entropy.detach(), own.grad

    results = run_ranks(bounded_losses, -(-vocabulary // width))
    gradient = torch.cat([own for _, own in results], dim=-1)[..., :vocabulary]
    torch.testing.assert_close(gradient, reference.grad, rtol=1e-5, atol=1e-6)
    for losses, _ in results:
        torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-5)


def test_logits_can_be_used_for_one_backward_pass_only() -> None:
    """The gradient takes their place, so a second backward pass must not read them."""

    def twice(world: World) -> str:
        group = dist.group.WORLD
        assert group is not None
        logits = torch.zeros(2, 1, 5, requires_grad=True)
        labels = torch.zeros(1, 2, dtype=torch.int64)
        losses = token_losses(logits * 1.0, labels, 5, group).cross_entropy
        losses.sum().backward(retain_graph=True)
        try:
            losses.sum().backward()
        except RuntimeError as error:
            return str(error)
        return ""

    assert "inplace operation" in run_ranks(twice, 1)[0]


def test_no_tensor_of_the_logits_size_is_made_in_fp32() -> None:
    def largest_allocation(world: World) -> int:
        group = dist.group.WORLD
        assert group is not None
        logits = torch.zeros(256, 4, 4096, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(4, 256, dtype=torch.int64)
        with torch.profiler.profile(profile_memory=True) as profile:
            token_losses(logits, labels, 4096, group).cross_entropy.sum().backward()
        sizes = [event.cpu_memory_usage for event in profile.events()]
        return max(sizes)

    (largest,) = run_ranks(largest_allocation, 1)
    assert 0 < largest <= 2 * loss.CPU_LOSS_CHUNK_BYTES
