"""Fused kernels are used only after a call that agrees with torch's."""

import pytest
import torch

from frontier_llm.device import kernels
from frontier_llm.device.kernels import Kernels, resolve, torch_layer_norm, torch_rms_norm
from frontier_llm.errors import ConfigError

CPU = torch.device("cpu")


def test_without_extensions_torch_is_used_and_the_reason_is_kept() -> None:
    found = resolve("auto", CPU)
    assert found.source == "torch"
    assert "apex" in found.reason
    assert "transformer_engine" in found.reason
    assert resolve("torch", CPU).reason == "kernels=torch"


@pytest.mark.parametrize("deterministic", [False, True])
def test_only_a_run_that_need_not_repeat_exactly_measures_on_a_gpu(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = resolve("auto", torch.device("cuda"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.on_trial is not deterministic
    assert found.compiles_functions is not deterministic


def test_missing_fused_kernels_are_an_error_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="apex: No module named 'apex'"):
        resolve("fused", CPU)


def test_a_kernel_with_other_results_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A correct forward pass with a wrong gradient is not enough."""

    def wrong_gradient(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, e: float) -> torch.Tensor:
        return torch_layer_norm(x, w.detach() + 0 * w, b, e)

    def good() -> Kernels:
        return Kernels(torch_layer_norm, torch_rms_norm, "good", "")

    def bad() -> Kernels:
        return Kernels(wrong_gradient, torch_rms_norm, "bad", "")

    def imprecise_in_bf16() -> Kernels:
        def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, e: float) -> torch.Tensor:
            error = 0.1 if x.dtype == torch.bfloat16 else 0.0
            return torch_layer_norm(x, w, b, e) + error

        return Kernels(norm, torch_rms_norm, "imprecise", "")

    monkeypatch.setattr(kernels, "_apex", imprecise_in_bf16)
    monkeypatch.setattr(kernels, "_transformer_engine", good)
    assert resolve("fused", CPU, torch.float32, 128).source == "imprecise"
    assert resolve("fused", CPU, torch.bfloat16, 128).source == "good"
    monkeypatch.setattr(kernels, "_apex", bad)
    monkeypatch.setattr(kernels, "_transformer_engine", good)
    assert resolve("fused", CPU).source == "good"
    monkeypatch.setattr(kernels, "_transformer_engine", bad)
    assert resolve("auto", CPU).source == "torch"
