"""AdamW on fp32 intervals: master weights and moments, updated by torch's fused kernel.

In shapes, n is the number of elements of a unit's flat buffer, and o the number of ranks over which
its optimizer states are divided.
Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv:1711.05101).
"""

from collections.abc import Collection, Mapping, Sequence

import torch

from frontier_llm.geometry.partition import Interval
from frontier_llm.protocols import ParameterRecord
from frontier_llm.sharding.masters import Masters
from frontier_llm.sharding.unit import Unit
from frontier_llm.sharding.update_groups import (
    UpdateGroup,
    UpdateRule,
    update_groups,
    update_ranges,
)


class AdamW(Masters):
    """The optimizer states of this rank: one interval of n/o elements of each unit.

    Attributes:
        exp_avgs: per unit, [n / o] fp32, first moments.
        exp_avg_sqs: per unit, [n / o] fp32, second moments.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        gradients: Sequence[torch.Tensor],
        rule: UpdateRule,
        separate_masters: bool = False,
    ) -> None:
        """Initialise master weights from the parameters and moments with zeros.

        Args:
            units: the trainable units.
            gradients: per unit, [n / o] fp32; `update` reads them and divides them in place.
            rule: constants of the update rule.
            separate_masters: whether master weights are a copy even if the parameters are fp32.
        """
        super().__init__(units, separate=separate_masters)
        self._is_by_parameter = False
        self._updated: list[UpdateGroup] | None = None
        self._gradients, self._rule = gradients, rule
        self.exp_avgs = [torch.zeros_like(master) for master in self.masters]
        self.exp_avg_sqs = [self._zero_second_moments(unit) for unit in units]
        self._groups = update_groups(units, rule, self.masters[0].device) if units else []

    def states_of(self, index: int, interval: Interval) -> Mapping[str, torch.Tensor]:
        """Return the states of an interval of unit `index`, by name; see `Optimizer`."""
        part = self.part(index, interval)
        return {
            "master": self.masters[index][part],
            "exp_avg": self.exp_avgs[index][part],
            "exp_avg_sq": self._second_moments(index, part),
        }

    @property
    def moment_bytes(self) -> int:
        """Bytes of all states but the master weights."""
        return sum(moment.nbytes for moment in (*self.exp_avgs, *self.exp_avg_sqs))

    def update(
        self,
        learning_rate: float,
        gradient_divisor: torch.Tensor,
        skip: torch.Tensor | None = None,
    ) -> None:
        """Update masters and moments. `write_parameters` must follow, unless the update is skipped.

        Args:
            learning_rate: learning rate of this step, which groups of parameters multiply by their
                factors.
            gradient_divisor: [] fp32 on the device; gradients are divided by it first.
            skip: [] fp32 on the device; if 1, nothing changes. None: 0.
        """
        groups, self._updated = self._updated or self._groups, None
        for group in groups:
            update_ranges(
                self._rule,
                group,
                [
                    group.views(self.masters),
                    group.views(self._gradients),
                    group.views(self.exp_avgs),
                    [self._second_moments(index, part) for index, part in group.ranges],
                ],
                learning_rate=learning_rate,
                gradient_divisor=gradient_divisor,
                skip=skip,
            )

    def leave_out(self, parameters: Collection[ParameterRecord]) -> None:
        """Leave parameters as they are in the next update, and do not count it for them."""
        self._divide_by_parameter()
        self._updated = [group.without(self._units, parameters) for group in self._groups]

    def resume(self, updates: int, missed: Mapping[str, int] | None = None) -> None:
        """Continue from masters and moments that the caller has overwritten.

        Args:
            updates: number of updates in these states, for the moments' bias correction.
            missed: number of updates that left a parameter out, by its name.
        """
        if missed:
            self._divide_by_parameter()
        for group in self._groups:
            for (index, part), counter in zip(group.ranges, group.step_counters, strict=True):
                name = self._units[index].record_at(part.start).name
                counter.fill_(updates - (missed or {}).get(name, 0))
        self.write_parameters()

    def _divide_by_parameter(self) -> None:
        """Count updates for each parameter by itself from now on."""
        if not self._is_by_parameter:
            self._groups = [group.by_parameter(self._units) for group in self._groups]
            self._is_by_parameter = True

    def _zero_second_moments(self, unit: Unit) -> torch.Tensor:
        return self.masters[0].new_zeros(unit.optimizer_interval.length)

    def _second_moments(self, index: int, part: slice) -> torch.Tensor:
        """Return the second moments of a part of the optimizer interval of unit `index`."""
        return self.exp_avg_sqs[index][part]
