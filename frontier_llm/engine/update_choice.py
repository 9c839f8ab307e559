"""Decides on the device whether and how a step updates, so that the host need not wait."""

from typing import NamedTuple

import torch


class UpdateChoice(NamedTuple):
    """What the update of a step does; tensors on the device."""

    divisor: torch.Tensor
    """[] fp32, the number by which the update divides gradients: their scale, multiplied by
    norm / limit if the norm exceeds the limit."""
    skip: torch.Tensor
    """[] fp32, 1 if nothing may be updated, else 0."""


def choose_update(
    squared_norm: torch.Tensor,
    scale: torch.Tensor | float,
    clip_norm: float | None,
    applies: torch.Tensor | None = None,
) -> UpdateChoice:
    """Compute the divisor of the gradients, and whether to skip the update; the host does not wait.

    Args:
        squared_norm: [] fp64, the squared norm of the gradients as they were summed.
        scale: number by which they must be divided.
        clip_norm: largest norm, after this division, that is not clipped; None: no norm is clipped.
        applies: [] bool, whether the update is done if the norm is finite; None: it is.
    """
    norm = squared_norm.sqrt() / scale
    excess = (norm / clip_norm).clamp(min=1.0) if clip_norm else torch.ones_like(norm)
    finite = norm.isfinite() if applies is None else norm.isfinite() & applies
    return UpdateChoice((excess * scale).float(), finite.logical_not().float())
