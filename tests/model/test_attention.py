"""The attention core against the textbook, and its memory against an [s, s] matrix."""

import math
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from frontier_llm.geometry.state_memory import CPU_QUERY_BLOCK
from frontier_llm.launch.world import World
from frontier_llm.model.attention import SdpaAttention
from frontier_llm.model.reads import Reads, Scores
from frontier_llm.parallel.megatron_cpu import install
from tests.ranks import run_ranks

TOKENS = 1024


CAUSAL = Reads(after=1)


def make_core(dropout: float = 0.0) -> SdpaAttention:
    return SdpaAttention(Scores(dropout=dropout))


def textbook(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Softmax attention written out, [s, b, h, d] each."""
    repeat = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(repeat, 2), value.repeat_interleave(repeat, 2)
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) / math.sqrt(query.shape[-1])
    scores.masked_fill_(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    return torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), value).flatten(2)


def random_qkv(tokens: int, heads: int, groups: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, 2, h, 8) for h in (heads, groups, groups)]
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_equals_textbook_attention(groups: int) -> None:
    inputs = random_qkv(37, 4, groups)
    weight = torch.randn(37, 2, 32, generator=torch.Generator().manual_seed(1))
    results = []
    for function in (lambda *x: make_core()(*x, CAUSAL), textbook):
        out = function(*inputs)
        gradients = torch.autograd.grad((out * weight).sum(), inputs)
        results.append([out, *gradients])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def dropout_statistics(world: World) -> dict[str, Any]:
    install()
    model_parallel_cuda_manual_seed(0, tp_rank=0, ep_rank=0, etp_rank=0)
    tokens = CPU_QUERY_BLOCK + 9  # two blocks, the second ragged
    query, key, value = random_qkv(tokens, 4, 2)
    core = make_core(dropout=0.25)
    draws = torch.stack([core(query, key, value, CAUSAL).detach() for _ in range(400)])
    core.eval()
    exact = core(query, key, value, CAUSAL)
    core.train()
    out = core(query, key, value, CAUSAL)
    gradient = torch.autograd.grad(out.sum(), value)[0]
    # for given masks the output is linear in `value`: with the same ones the gradient gives it back
    mask_error = (out.sum() - (gradient * value).sum()).abs() / out.abs().sum()
    # an output row of all ones in `value` is the sum of the kept probabilities
    ones = core(query, key, torch.ones_like(value), CAUSAL).detach()
    return {
        "bias": (draws.mean(0) - exact).abs().max().item(),
        "spread": draws.std(0)[1:].min().item(),
        "first_row": sorted(
            set(ones[0].flatten().round(decimals=3).double().round(decimals=3).tolist())
        ),
        "mask_error": mask_error.item(),
    }


def test_dropout_keeps_the_mean_and_recomputes_the_same_masks() -> None:
    found = run_ranks(dropout_statistics, 1)[0]
    assert found["bias"] < 0.3  # 400 draws of values around 1
    assert found["spread"] > 0
    assert found["first_row"] in ([0.0, 1.333], [1.333])  # dropped, or kept and scaled
    assert found["mask_error"] < 1e-5  # with other masks 4e-3


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operator returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def largest_tensor(world: World, dropout: float) -> int:
    install()
    model_parallel_cuda_manual_seed(0, tp_rank=0, ep_rank=0, etp_rank=0)
    core = make_core(dropout)
    inputs = [torch.randn(TOKENS, 1, 2, 8, requires_grad=True) for _ in range(3)]
    with LargestTensor() as largest:
        core(*inputs, CAUSAL).sum().backward()
    return largest.elements


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_no_square_matrix_in_memory(dropout: float) -> None:
    assert run_ranks(largest_tensor, 1, dropout)[0] <= 2 * CPU_QUERY_BLOCK * TOKENS


def test_the_textbook_would_be_caught() -> None:
    inputs = [torch.randn(TOKENS, 1, 2, 8) for _ in range(3)]
    with LargestTensor() as largest:
        textbook(*inputs)
    assert largest.elements >= 2 * TOKENS**2
