"""AdamW on fp32 intervals, with moments in fp32 or in 8 bits, by torch's fused kernel.

Sources: Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv:1711.05101); Dettmers
et al., 8-bit Optimizers via Block-wise Quantization (arXiv:2110.02861).
"""

from collections.abc import Collection, Mapping

import torch
from typing_extensions import override

from frontier_llm.collectives.block_codes import BlockCodes, EncodedPart
from frontier_llm.geometry.partition import Interval
from frontier_llm.protocols import ParameterRecord, State
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


class AdamW8bit(Optimizer):
    """Master weights in fp32, and two moments in 8 bits.

    An update decodes the moments of one unit, updates them in fp32 as AdamW does, and encodes them
    again. Checkpoints store the decoded moments under the names of AdamW's, so that either of the
    two optimizers resumes from the states of the other.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._moments = [
            tuple(BlockCodes(len(m), m.device, signed=signed) for signed in (True, False))
            for m in self.masters
        ]
        groups = update_groups(setup.units, setup.rule)
        self._groups: list[list[UpdateGroup]] = [
            [group for group in (whole.of_unit(index) for whole in groups) if group.ranges]
            for index in range(len(setup.units))
        ]

    @override
    def states_of(self, index: int, interval: Interval) -> Mapping[str, State]:
        part = self.part(index, interval)
        first, second = self._moments[index]
        return {
            "master": self.masters[index][part],
            "exp_avg": EncodedPart(first, part.start, part.stop),
            "exp_avg_sq": EncodedPart(second, part.start, part.stop),
        }

    @override
    def writable_states_of(self, index: int, interval: Interval) -> Mapping[str, torch.Tensor]:
        part = self.part(index, interval)
        first, second = self._moments[index]
        return {
            "master": self.masters[index][part],
            "exp_avg": first.staged()[part],
            "exp_avg_sq": second.staged()[part],
        }

    @property
    @override
    def moment_bytes(self) -> int:
        return sum(codes.nbytes for moments in self._moments for codes in moments)

    @property
    @override
    def saved_bytes(self) -> int:
        return 3 * sum(master.nbytes for master in self.masters)

    @override
    def update(
        self, learning_rate: float, gradient_divisor: torch.Tensor, skip: torch.Tensor
    ) -> None:
        for groups, moments in zip(self._groups, self._moments, strict=True):
            decoded = [codes.decode() for codes in moments]
            for group in groups:
                tensors = [group.views(self.masters), group.views(self._gradients)]
                tensors += [[values[part] for _, part in group.ranges] for values in decoded]
                update_ranges(self._rule, group, tensors, learning_rate, gradient_divisor, skip)
            for codes, values in zip(moments, decoded, strict=True):
                codes.encode(values)

    @override
    def resume(self, updates: int) -> None:
        for moments in self._moments:
            for codes in moments:
                codes.commit()
        for groups in self._groups:
            for group in groups:
                for counter in group.step_counters:
                    counter.fill_(updates)
        self.write_parameters()
