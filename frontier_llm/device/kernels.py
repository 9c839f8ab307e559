"""Which implementation of the norms is used: torch's, or a fused one that proved itself.

The one door to apex and TransformerEngine. Both import without error when their compiled parts
are absent, so a kernel is believed only after a call on a tiny tensor, forward and backward,
agreed with torch's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from frontier_llm.errors import ConfigError

LayerNormFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
RmsNormFunction = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def torch_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Layer norm over the last dim of [..., hidden]."""
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root-mean-square norm over the last dim of [..., hidden]."""
    return F.rms_norm(x, weight.shape, weight, epsilon)


@dataclass(frozen=True)
class Kernels:
    """The resolved choice, and why."""

    layer_norm: LayerNormFunction
    rms_norm: RmsNormFunction
    source: str
    """`torch` or `apex` or `transformer_engine`."""
    reason: str
    """Why this one: for the log and the report."""


TORCH = Kernels(torch_layer_norm, torch_rms_norm, "torch", "kernels=torch")


def resolve(wanted: str, device: torch.device) -> Kernels:
    """Choose the kernels for a device.

    Args:
        wanted: `torch`, `fused` (must work) or `auto` (fused where it works).
        device: where the proof is made.

    Raises:
        ConfigError: `fused` was asked for and none works; says why for each.
    """
    if wanted == "torch":
        return TORCH
    refusals = []
    for make in (_apex, _transformer_engine):
        try:
            kernels = make()
            _prove(kernels, device)
        except Exception as error:  # any failure of a foreign extension means: do not use it
            refusals.append(f"{make.__name__.strip('_')}: {error}")
        else:
            return kernels
    reason = "; ".join(refusals)
    if wanted == "fused":
        raise ConfigError(
            "kernels",
            "fused",
            f"apex or TransformerEngine that works here ({reason})",
            "install one of them for this device, or set kernels=torch",
        )
    return Kernels(torch_layer_norm, torch_rms_norm, "torch", reason)


def _apex() -> Kernels:
    from apex.normalization.fused_layer_norm import (
        fused_layer_norm_affine,
        fused_rms_norm_affine,
    )

    return Kernels(
        lambda x, w, b, e: fused_layer_norm_affine(x, w, b, w.shape, e),
        lambda x, w, e: fused_rms_norm_affine(x, w, w.shape, e),
        "apex",
        "proved on a tiny tensor",
    )


def _transformer_engine() -> Kernels:
    import transformer_engine.pytorch as te

    def layer_norm(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        module = te.LayerNorm(weight.shape[0], eps=epsilon, device="meta")
        return torch.func.functional_call(module, {"weight": weight, "bias": bias}, (x,))

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        module = te.RMSNorm(weight.shape[0], eps=epsilon, device="meta")
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    return Kernels(layer_norm, rms_norm, "transformer_engine", "proved on a tiny tensor")


def _prove(kernels: Kernels, device: torch.device) -> None:
    """Compare values and gradients with torch's on [2, 64] numbers; raise where they differ."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((2, 64), 64, 64))
    pairs: tuple[tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], tuple], ...] = (
        (kernels.layer_norm, torch_layer_norm, (x, weight, bias)),
        (kernels.rms_norm, torch_rms_norm, (x, weight)),
    )
    for ours, reference, arguments in pairs:
        results = []
        for function in (ours, reference):
            leaves = [a.to(device, copy=True).requires_grad_() for a in arguments]
            out = function(*leaves, 1e-5)
            out.square().sum().backward()
            results.append([out.detach(), *(leaf.grad for leaf in leaves)])
        for mine, expected in zip(*results, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3)
