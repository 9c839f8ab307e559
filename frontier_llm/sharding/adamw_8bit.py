"""AdamW whose moments are kept in 8 bits per element.

In shapes, n is the number of elements of a unit's flat buffer, and o the number of ranks over which
its optimizer states are divided.
Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv:2110.02861).
"""

from collections.abc import Mapping, Sequence

import torch

from frontier_llm.collectives.block_codes import BlockCodes, EncodedPart, total_bytes
from frontier_llm.geometry.partition import Interval
from frontier_llm.protocols import State
from frontier_llm.sharding.masters import Masters
from frontier_llm.sharding.unit import Unit
from frontier_llm.sharding.update_groups import (
    UpdateGroup,
    UpdateRule,
    update_groups,
    update_ranges,
)


class AdamW8bit(Masters):
    """The optimizer states of this rank: fp32 master weights, and two moments in 8 bits.

    An update decodes the moments of one unit, updates them in fp32 as AdamW does, and encodes them
    again. Checkpoints store the decoded moments under the names of AdamW's, so that either of the
    two optimizers resumes from the states of the other.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        gradients: Sequence[torch.Tensor],
        rule: UpdateRule,
        separate_masters: bool = False,
    ) -> None:
        """Initialise master weights from the parameters and moments with zeros.

        The arguments are those of `AdamW`.
        """
        super().__init__(units, separate=separate_masters)
        self._gradients, self._rule = gradients, rule
        self._moments = [
            tuple(BlockCodes(len(m), m.device, signed=signed) for signed in (True, False))
            for m in self.masters
        ]
        groups = update_groups(units, rule, self.masters[0].device) if units else []
        self._groups: list[list[UpdateGroup]] = [
            [group for group in (whole.of_unit(index) for whole in groups) if group.ranges]
            for index in range(len(units))
        ]

    def states_of(self, index: int, interval: Interval) -> Mapping[str, State]:
        """Return the states of an interval of unit `index`, by name; see `Optimizer`."""
        part = self.part(index, interval)
        first, second = self._moments[index]
        return {
            "master": self.masters[index][part],
            "exp_avg": EncodedPart(first, part.start, part.stop),
            "exp_avg_sq": EncodedPart(second, part.start, part.stop),
        }

    def writable_states_of(self, index: int, interval: Interval) -> Mapping[str, torch.Tensor]:
        """Return tensors for the states of an interval of unit `index`; see `Optimizer`."""
        part = self.part(index, interval)
        first, second = self._moments[index]
        return {
            "master": self.masters[index][part],
            "exp_avg": first.staged()[part],
            "exp_avg_sq": second.staged()[part],
        }

    @property
    def moment_bytes(self) -> int:
        """Bytes of all states but the master weights."""
        return sum(total_bytes(moments) for moments in self._moments)

    @property
    def saved_bytes(self) -> int:
        """Bytes of all states in a checkpoint, padding included: three fp32 numbers an element."""
        return 3 * sum(master.nbytes for master in self.masters)

    def update(
        self,
        learning_rate: float,
        gradient_divisor: torch.Tensor,
        skip: torch.Tensor | None = None,
    ) -> None:
        """Update all states; the arguments are those of `AdamW.update`."""
        for groups, moments in zip(self._groups, self._moments, strict=True):
            decoded = [codes.decode() for codes in moments]
            for group in groups:
                views = [[values[part] for _, part in group.ranges] for values in decoded]
                update_ranges(
                    self._rule,
                    group,
                    [group.views(self.masters), group.views(self._gradients), *views],
                    learning_rate=learning_rate,
                    gradient_divisor=gradient_divisor,
                    skip=skip,
                )
            for codes, values in zip(moments, decoded, strict=True):
                codes.encode(values)

    def resume(self, updates: int) -> None:
        """Continue from states that the caller has overwritten; see `Optimizer`."""
        for moments in self._moments:
            for codes in moments:
                codes.commit()
        for groups in self._groups:
            for group in groups:
                for counter in group.step_counters:
                    counter.fill_(updates)
        self.write_parameters()
