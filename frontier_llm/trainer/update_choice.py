"""Decides on the device whether and how a step updates, so that the host need not wait."""

from typing import NamedTuple

import torch

from frontier_llm.trainer.totals import SCALARS


class UpdateChoice(NamedTuple):
    """What the update of a step does; tensors on the device."""

    divisor: torch.Tensor
    """[] fp32, the number by which the update divides gradients: the loss scale, multiplied by the
    weight per sample (`Batch.weight`), and by norm / limit if the norm exceeds the limit."""
    skip: torch.Tensor
    """[] fp32, 1 if nothing may be updated: if the norm or the loss is not finite, or the number of
    samples or ranks is wrong (the step then raises an error); else 0."""


def choose_update(
    totals: torch.Tensor, loss_scale: float, clip_norm: float | None, samples: int, ranks: int
) -> UpdateChoice:
    """Compute the divisor of the gradients, and whether to skip the update; the host does not wait.

    Args:
        totals: result of `Totals.reduce`, equal on all ranks.
        loss_scale: factor of the loss, and therefore of the gradients.
        clip_norm: largest norm that is not clipped; None: no norm is clipped.
        samples: number of samples that the step must have processed.
        ranks: number of ranks whose addends the sums must have.
    """
    sums = dict(zip(SCALARS, totals[: len(SCALARS)].unbind(), strict=True))
    scale = sums["weight"] / sums["samples"] * loss_scale
    norm = sums["squared_norm"].sqrt() / scale
    excess = (norm / clip_norm).clamp(min=1.0) if clip_norm else torch.ones_like(norm)
    is_complete = (sums["samples"] == samples) & (sums["ranks"] == ranks)
    applies = norm.isfinite() & sums["loss_sum"].isfinite() & is_complete
    return UpdateChoice((excess * scale).float(), applies.logical_not().float())
