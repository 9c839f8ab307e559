"""The flat buffers of one unit."""

from collections.abc import Sequence

import torch

from frontier_llm.geometry.partition import FlatLayout, flat_layout
from frontier_llm.protocols import ParameterRecord


class FlatUnit:
    """One unit's parameters in one buffer, and their gradients in another.

    Attributes:
        name: of the unit.
        records: its parameters.
        layout: where each lies.
        parameters: [n] compute dtype; the records' parameters are views into it.
        gradients: [n] fp32, accumulated over micro-batches.
    """

    def __init__(self, name: str, records: Sequence[ParameterRecord]) -> None:
        self.name = name
        self.records = tuple(records)
        self.layout: FlatLayout = flat_layout(
            [r.parameter.numel() for r in records], [r.decayed for r in records]
        )
        first = records[0].parameter
        self.parameters = first.new_zeros(self.layout.size)
        self.gradients = torch.zeros(self.layout.size, dtype=torch.float32, device=first.device)
        for index, record in enumerate(self.records):
            home = self.view(self.parameters, index)
            home.copy_(record.parameter.data)
            record.parameter.data = home

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Return record `index`'s part of a flat buffer, in the parameter's shape."""
        start = self.layout.starts[index]
        parameter = self.records[index].parameter
        return flat[start : start + parameter.numel()].view(parameter.shape)


def make_units(records: Sequence[ParameterRecord]) -> list[FlatUnit]:
    """Group records by unit, in the order of their first appearance, and lay them out."""
    by_unit: dict[str, list[ParameterRecord]] = {}
    for record in records:
        by_unit.setdefault(record.unit, []).append(record)
    return [FlatUnit(name, members) for name, members in by_unit.items()]
