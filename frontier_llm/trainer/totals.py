"""Sums the numbers that all ranks must agree on after a step, in one small all-reduce."""

from collections.abc import Sequence
from dataclasses import astuple
from itertools import islice

import torch
import torch.distributed as dist

from frontier_llm.collectives.primitives import all_reduce
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.device.transfer import send
from frontier_llm.engine.update import UpdateChoice, choose_update
from frontier_llm.geometry.grid import LEVELS
from frontier_llm.geometry.wire import Sent

SCALARS = (
    "squared_norm",
    "loss_sum",
    "z_loss_sum",
    "samples",
    "weight",
    "digest",
    "stop",
    "checkpoint",
    "saving_shared",
    "saving_local",
    "ranks",
)
"""Names of the numbers that are summed; trainer/step.py computes each rank's addends."""
COLLECTIVES = (
    "gather_params", "reduce_grads", "reduce_states", "refresh_params", "sequence_norms",
    "tied_copies", "whole_matrices", "factored_moments",
    "tensor", "pipeline", "totals",
)  # fmt: skip
"""Names of the collectives whose bytes are counted."""
QUANTISABLE = COLLECTIVES[:4]
"""Collectives that can be quantised."""


class Totals:
    """Sums numbers over all ranks. All ranks get the same sums, so they make the same decisions."""

    def __init__(self, device: torch.device, traffic: Traffic) -> None:
        self._device, self._traffic = device, traffic

    def reduce(self, addends: dict[str, float | torch.Tensor]) -> torch.Tensor:
        """Sum the addends of all ranks, and the bytes that they have sent since the last call.

        Collective over all ranks. On a GPU the host does not wait. The bytes of this all-reduce
        count in the next call.

        Args:
            addends: this rank's addend for each name in `SCALARS`; tensors lie on the device.

        Returns:
            [numbers] fp64, on the device. The first numbers are the sums, in the order of
            `SCALARS`; `read_totals` explains the others.
        """
        sent, unquantised = self._traffic.take(), self._traffic.take_unquantised()
        unknown = set(sent) - set(COLLECTIVES)
        assert not unknown, f"collectives that are not in COLLECTIVES: {unknown}"
        values = [addends[name] for name in SCALARS]
        by_link = [sent.get(name, Sent()) for name in COLLECTIVES]
        by_link += [unquantised.get(name, Sent()) for name in QUANTISABLE]
        known = [0.0 if isinstance(value, torch.Tensor) else float(value) for value in values]
        known += [count for volume in by_link for count in astuple(volume)]
        vector = send(known, self._device)
        for index, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                vector[index].copy_(value)
        group = dist.group.WORLD
        assert group is not None
        all_reduce(vector, group, self._traffic, "totals").wait()
        return vector


def read_totals(
    numbers: Sequence[float],
) -> tuple[dict[str, float], dict[str, Sent], dict[str, Sent]]:
    """Explain the result of `Totals.reduce`, after it was copied to the host.

    Returns:
        Three values: the sums, by name; the bytes that all ranks have sent, by collective; and the
        bytes that quantised collectives would have sent in the compute precision, by collective.
    """
    sums = dict(zip(SCALARS, numbers, strict=False))
    byte_counts = iter(numbers[len(SCALARS) :])
    sent = {name: Sent(*islice(byte_counts, len(LEVELS))) for name in COLLECTIVES}
    as_if = {name: Sent(*islice(byte_counts, len(LEVELS))) for name in QUANTISABLE}
    return sums, sent, {name: volume for name, volume in as_if.items() if volume != sent[name]}


def choose_by_sums(
    totals: torch.Tensor, loss_scale: float, clip_norm: float | None, samples: int, ranks: int
) -> UpdateChoice:
    """Choose the update of a step; the host does not wait.

    It is skipped if the norm or the loss is not finite, or if the number of samples or ranks in the
    totals (`Totals.reduce`) is wrong, for which the step then raises an error. Gradients are
    divided by the loss scale, multiplied by the weight per sample (`Batch.weight`).
    """
    sums = dict(zip(SCALARS, totals[: len(SCALARS)].unbind(), strict=True))
    is_complete = (sums["samples"] == samples) & (sums["ranks"] == ranks)
    return choose_update(
        sums["squared_norm"],
        sums["weight"] / sums["samples"] * loss_scale,
        clip_norm,
        sums["loss_sum"].isfinite() & is_complete,
    )
