"""The squared norm of a rank's gradients, each element of the model counted on one rank."""

from collections.abc import Sequence

import torch

from frontier_llm.geometry.partition import Interval
from frontier_llm.sharding.unit import Unit


class GradNorm:
    """Sums squares over the ranges of gradients that this rank counts."""

    def __init__(self, units: Sequence[Unit], gradients: Sequence[torch.Tensor]) -> None:
        """Find the ranges.

        Args:
            units: the trainable ones.
            gradients: a unit each, [n / o] fp32.
        """
        self._ranges = [
            unit.part(gradient, interval, unit.optimizer)
            for unit, gradient in zip(units, gradients, strict=True)
            for interval in _counted(unit)
        ]

    def squared(self) -> torch.Tensor:
        """Return [] fp64, the sum of squares of the counted gradients."""
        if not self._ranges:
            return torch.zeros((), dtype=torch.float64)
        norms = torch.stack([torch.linalg.vector_norm(part) for part in self._ranges])
        return norms.double().square().sum()


def _counted(unit: Unit) -> list[Interval]:
    """Return the counted parts of a unit's optimizer interval, adjacent ones merged."""
    merged: list[Interval] = []
    held = [
        interval for index, interval, _ in unit.held_parameters() if unit.records[index].counted
    ]
    for interval in sorted(held):
        if merged and merged[-1].stop == interval.start:
            last = merged.pop()
            interval = Interval(last.start, last.length + interval.length)
        merged.append(interval)
    return merged
