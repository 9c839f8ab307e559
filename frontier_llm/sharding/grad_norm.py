"""The squared norm of a rank's gradients, each element of the model counted on one rank."""

from collections.abc import Sequence

import torch

from frontier_llm.sharding.flat_buffer import FlatUnit


class GradNorm:
    """Sums squares over the ranges of gradients that this rank counts."""

    def __init__(self, units: Sequence[FlatUnit]) -> None:
        self._ranges = [piece for unit in units for piece in _counted_ranges(unit)]

    def squared(self) -> torch.Tensor:
        """Return [] fp64, this rank's share of the squared norm of the accumulated gradients."""
        if not self._ranges:
            return torch.zeros((), dtype=torch.float64)
        norms = torch.stack([torch.linalg.vector_norm(part) for part in self._ranges])
        return norms.double().square().sum()


def _counted_ranges(unit: FlatUnit) -> list[torch.Tensor]:
    """Cut a unit's gradient buffer into its counted parts, adjacent ones merged."""
    spans: list[list[int]] = []
    order = sorted(range(len(unit.records)), key=lambda i: unit.layout.starts[i])
    for index in order:
        record, start = unit.records[index], unit.layout.starts[index]
        if not record.counted:
            continue
        end = start + record.parameter.numel()
        if spans and spans[-1][1] == start:
            spans[-1][1] = end
        else:
            spans.append([start, end])
    return [unit.gradients[start:end] for start, end in spans]
