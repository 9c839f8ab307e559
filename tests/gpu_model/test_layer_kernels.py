"""A layer of LLaMA-7B keeps to its budget of kernels and of memory traffic, eager and compiled."""

import pytest
import torch

from frontier_llm.model import layer
from tests.gpu_model import fake_cuda, generated_code
from tests.gpu_model.layer_kernels import GRADIENT_SUM, LayerKernels, count

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not fake_cuda.PRELOADED, reason="run `make test-gpu-model`"),
]

PRODUCTS = {"mm": 12, "attention": 2}
"""Kernels per layer that every setting needs: 4 products, each with 2 in the backward pass."""
BUDGETS = {"torch": (57, 4.2e9), "elementwise": (30, 2.0e9), "compiled": (35, 2.0e9)}
"""Kernels, and bytes without those of products, attention and sums of gradients."""
GRADIENT_SUMS = {"torch": 2, "elementwise": 2, "compiled": 6}
"""Kernels that add a gradient to the sum: of norms, and of matrices in compiled layers."""


def keeps_to(budget: tuple[int, float], found: LayerKernels) -> bool:
    """Return whether a layer starts no more kernels, and moves no more bytes, than allowed."""
    return found.kernels.total() <= budget[0] and found.other_bytes <= budget[1]


@pytest.mark.parametrize("kernels", BUDGETS)
def test_a_layer_keeps_to_its_budget(kernels: str) -> None:
    found = count(kernels)
    for product, number in PRODUCTS.items():
        assert sum(n for name, n in found.kernels.items() if product in name) == number
    assert found.kernels[GRADIENT_SUM] == GRADIENT_SUMS[kernels]
    assert keeps_to(BUDGETS[kernels], found), found
    if kernels == "compiled":  # one graph: nothing else happens outside the generated code
        assert {name for name in found.kernels if name.startswith("aten.")} == {GRADIENT_SUM}


def test_lost_fusion_breaks_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fusion by inductor there are more kernels, which move more bytes."""
    settings = {**generated_code.SETTINGS, "max_fusion_size": 1}
    monkeypatch.setattr(generated_code, "SETTINGS", settings)
    assert not keeps_to(BUDGETS["compiled"], count("compiled"))


def test_a_split_graph_breaks_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = layer.rotate

    def splits(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch._dynamo.graph_break()
        return rotate(*arguments)

    monkeypatch.setattr(layer, "rotate", splits)
    assert not keeps_to(BUDGETS["compiled"], count("compiled"))


def test_fused_gradients_leave_out_a_pass_over_each_weight() -> None:
    """Without them, each of four gradients is read in bf16 and added to fp32."""
    fused, separate = count("torch"), count("torch", "sharding.fused_gradients=false")
    weights = 4 * 4096**2 + 3 * 4096 * 11008
    assert separate.kernels[GRADIENT_SUM] - fused.kernels[GRADIENT_SUM] == 4
    moved = separate.kernel_bytes[GRADIENT_SUM] - fused.kernel_bytes[GRADIENT_SUM]
    assert moved == (2 + 4 + 4) * weights
    assert separate.kernels.total() - fused.kernels.total() == 4
