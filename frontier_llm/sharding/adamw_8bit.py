"""AdamW whose moments are kept in 8 bits per element.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv:2110.02861).
"""

from collections.abc import Mapping

import torch
from typing_extensions import override

from frontier_llm.collectives.block_codes import BlockCodes, EncodedPart
from frontier_llm.geometry.partition import Interval
from frontier_llm.protocols import State
from frontier_llm.sharding.optimizer_states import Optimizer, Setup
from frontier_llm.sharding.update_groups import UpdateGroup, update_groups, update_ranges


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
