"""AdamW on fp32 intervals: master weights and moments, updated by torch's fused kernel.

Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv:1711.05101).
"""

from collections.abc import Collection, Mapping

import torch
from typing_extensions import override

from frontier_llm.protocols import ParameterRecord
from frontier_llm.sharding.optimizer_states import Optimizer, Setup
from frontier_llm.sharding.update_groups import UpdateGroup, update_groups, update_ranges


class AdamW(Optimizer):
    """Master weights and two moments in fp32."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._is_by_parameter = False
        self._updated: list[UpdateGroup] | None = None
        self.exp_avgs = [torch.zeros_like(master) for master in self.masters]
        self.exp_avg_sqs = self._zero_second_moments()
        self._groups = update_groups(setup.units, setup.rule)

    @override
    def update(
        self, learning_rate: float, gradient_divisor: torch.Tensor, skip: torch.Tensor
    ) -> None:
        groups, self._updated = self._updated or self._groups, None
        for group in groups:
            tensors = [group.views(t) for t in (self.masters, self._gradients, self.exp_avgs)]
            tensors.append([self._second_moments(index, part) for index, part in group.ranges])
            update_ranges(self._rule, group, tensors, learning_rate, gradient_divisor, skip)

    def leave_out(self, parameters: Collection[ParameterRecord]) -> None:
        """Leave parameters as they are in the next update, and do not count it for them."""
        self._divide_by_parameter()
        self._updated = [group.without(self._units, parameters) for group in self._groups]

    @override
    def resume(self, updates: int, missed: Mapping[str, int] | None = None) -> None:
        """Continue; `missed` is the number of updates that left a parameter out, by its name."""
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
