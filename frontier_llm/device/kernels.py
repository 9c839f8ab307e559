"""Choose the kernels of the layers: the norms, and what torch.compile compiles.

The norms are torch's, or fused ones from apex or TransformerEngine. Both packages can be imported
even if their compiled parts are absent. Therefore fused kernels are used only if their forward and
backward pass on a small tensor gives the same result as torch's. trainer/assemble.py calls
`resolve` on each rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch.nn import functional as F

from frontier_llm.errors import ConfigError

LayerNormFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Arguments: input, weight, bias, epsilon."""
RmsNormFunction = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Arguments: input, weight, epsilon."""


def torch_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Return the layer norm over the last dim of [..., hidden]."""
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return the root-mean-square norm over the last dim of [..., hidden]."""
    return F.rms_norm(x, weight.shape, weight, epsilon)


@dataclass(frozen=True)
class Kernels:
    """The kernels that were chosen, and why."""

    layer_norm: LayerNormFunction
    rms_norm: RmsNormFunction
    source: str
    """`torch`, `elementwise`, `compiled`, `apex` or `transformer_engine`, or two of these, if the
    first steps choose."""
    reason: str
    """Why these kernels were chosen, for the log and the report."""
    compiles_layers: bool = False
    """Whether torch.compile makes the kernels of each transformer layer."""
    compiles_functions: bool = False
    """Whether torch.compile makes the kernels of rotary positions and of gated activations."""
    on_trial: bool = False
    """Whether the first steps decide if compiled functions are used."""


TORCH = Kernels(torch_layer_norm, torch_rms_norm, "torch", "kernels=torch")
COMPILED = replace(
    TORCH, source="compiled", reason="torch.compile of each layer", compiles_layers=True
)
ELEMENTWISE = replace(
    TORCH,
    source="elementwise",
    reason="torch.compile of rotary positions and gated activations",
    compiles_functions=True,
)


def use_deterministic_operations() -> None:
    """Make torch compute the same numbers in every run, on a GPU too.

    An operation that torch cannot compute in a fixed order raises an error. Attention is computed
    by torch's flash or memory-efficient kernels, which then add in a fixed order. Call it before
    the process groups are created, because torch then also excludes the algorithm NVLS of NCCL.
    """
    torch.use_deterministic_algorithms(True)
    # otherwise every torch.empty would be filled, which costs time and changes nothing: no
    # operation here reads memory that has not been written
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def resolve(
    wanted: str, device: torch.device, dtype: torch.dtype = torch.float32, hidden: int = 64
) -> Kernels:
    """Choose the kernels for a device, where fused ones are verified in this dtype.

    The setting `kernels` is `torch`, `elementwise`, `compiled`, `fused` (required), `auto` (fused
    norms if possible; on a GPU the same as `fastest`, unless torch is deterministic, because two
    runs could choose differently) or `fastest` (the same norms, and `elementwise` if it is faster
    in the first steps). Raises a ConfigError if `fused` is wanted and neither package works; the
    message says why.
    """
    without_packages = {"torch": TORCH, "compiled": COMPILED, "elementwise": ELEMENTWISE}
    if wanted in without_packages:
        return without_packages[wanted]
    fused_or_torch = _fused_or_torch(device, dtype, hidden)
    if wanted == "fused" and fused_or_torch.source == "torch":
        raise ConfigError(
            "kernels",
            "fused",
            f"apex or TransformerEngine that works here ({fused_or_torch.reason})",
            "install one of them for this device, or set kernels=torch",
        )
    measures = device.type != "cpu" and not torch.are_deterministic_algorithms_enabled()
    if {"fused": False, "auto": measures, "fastest": True}[wanted]:
        return replace(
            fused_or_torch,
            source=f"elementwise or {fused_or_torch.source}",
            reason="the faster one in the first steps",
            compiles_functions=True,
            on_trial=True,
        )
    return fused_or_torch


def _fused_or_torch(device: torch.device, dtype: torch.dtype, hidden: int) -> Kernels:
    """Return fused norms that work, otherwise torch's norms and why there are no others."""
    errors = []
    for make in (_apex, _transformer_engine):
        try:
            kernels = make()
            _verify(kernels, device, dtype, hidden)
        except Exception as error:  # any failure of a compiled extension
            errors.append(f"{make.__name__.strip('_')}: {error}")
        else:
            return kernels
    return Kernels(torch_layer_norm, torch_rms_norm, "torch", "; ".join(errors))


def _apex() -> Kernels:
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine

    return Kernels(
        lambda x, w, b, e: fused_layer_norm_affine(x, w, b, w.shape, e),
        lambda x, w, e: fused_rms_norm_affine(x, w, w.shape, e),
        "apex",
        "verified on a small tensor",
    )


def _transformer_engine() -> Kernels:
    import transformer_engine.pytorch as te

    # modules without memory, one per width, which are called with the parameters of the layers
    layer_norm_module = cache(partial(te.LayerNorm, device="meta"))
    rms_norm_module = cache(partial(te.RMSNorm, device="meta"))

    def layer_norm(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        module = layer_norm_module(weight.shape[0], eps=epsilon)
        return torch.func.functional_call(module, {"weight": weight, "bias": bias}, (x,))

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        module = rms_norm_module(weight.shape[0], eps=epsilon)
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    return Kernels(layer_norm, rms_norm, "transformer_engine", "verified on a small tensor")


def _verify(kernels: Kernels, device: torch.device, dtype: torch.dtype, hidden: int) -> None:
    """Compare values and gradients with torch's on [2, hidden] numbers; raise if they differ."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, hidden), hidden, hidden)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2  # an element may be rounded differently
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
        for result, expected in zip(*results, strict=True):
            torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
