"""Adafactor: factored second moments, clipped updates, steps in proportion to the weights.

Sources: Shazeer and Stern, Adafactor (arXiv:1804.04235, algorithms 4 to 6); Zhai et al., Scaling
Vision Transformers (arXiv:2106.04560, section 3.4), for the upper limit of the decay rate.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from typing_extensions import override

from frontier_llm.collectives.primitives import sum_together
from frontier_llm.geometry.partition import Interval
from frontier_llm.protocols import ParameterRecord, StateShard
from frontier_llm.sharding.factored_moments import (
    TINY,
    FactoredMoment,
    factored_moments,
    moment_shards,
)
from frontier_llm.sharding.optimizer_states import Optimizer, Setup
from frontier_llm.sharding.unit import Unit
from frontier_llm.sharding.update_groups import Settings

CLIPPING = 1.0
"""Largest root mean square of the update of a matrix, before it is multiplied by the rate."""
DECAY_POWER = 0.8
"""After t updates, the decay rate of second moments is 1 - t^-0.8, but at most beta2."""
SMALLEST_SCALE = 1e-3
"""The step of a matrix is the learning rate times the root mean square of its weights, but at
least times this number."""


@dataclass(frozen=True, eq=False)
class _Member:
    """A parameter of this rank's units: one or several matrices, or a vector."""

    index: int
    """Index of the unit."""
    part: slice
    """The elements whose states this rank holds, in the optimizer interval; may be empty."""
    settings: Settings
    counts: torch.Tensor
    """[m] fp32, number of elements of each of its m matrices, or of the vector (m = 1)."""
    is_added: bool
    """Whether this rank's sums over elements count, or those of another tensor rank that holds the
    same elements."""
    moment: FactoredMoment | None
    """Factored second moments; None for a vector."""

    def squares_of(self, interval: torch.Tensor) -> torch.Tensor:
        """Return [m] fp32: the sums of the squares of this rank's elements of a tensor."""
        if not self.is_added:
            return torch.zeros_like(self.counts)
        if self.moment is not None:
            return self.moment.squares_of(interval)
        return interval[self.part].square().sum().view(1)

    def scale(self, interval: torch.Tensor, factors: torch.Tensor) -> None:
        """Multiply this rank's elements of a tensor by the factors [m] of their matrices."""
        if self.moment is None:
            interval[self.part] *= factors
            return
        for box in self.moment.boxes:
            view = box.view(interval)
            view *= factors[self.moment.matrix_of_row[box.rows], None]


class Adafactor(Optimizer):
    """Master weights and, for vectors, second moments.

    The second moments of matrices and tables are factored (factored_moments.py), with `beta2` as
    the largest decay rate. Momentum is kept if `beta1`, its factor, is not 0. The bytes of sums
    over ranks count as `factored_moments`.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        units, rule, self._traffic = setup.units, setup.rule, setup.transport.traffic
        self._owners = setup.groups.along("params", "grads", "optimizer")
        self._tensor = setup.groups.tensor_group
        device = self.masters[0].device if units else torch.device("cpu")
        self._updates = torch.zeros((), device=device)
        self._moments = factored_moments(units, device)
        self._members = list(self._make_members(device))
        first = self._tensor.rank() == 0
        self._shards = [
            shard
            for moment in self._moments
            if moment.is_first
            for shard in moment_shards(moment, first_tensor_rank=first)
        ]
        self.exp_avgs = [torch.zeros_like(m) for m in self.masters if rule.beta1]
        self.exp_avg_sqs = self._zero_second_moments()

    @override
    def more_shards(self) -> Iterator[StateShard]:
        """Yield the factored moments of the parameters whose first element this rank holds."""
        yield from self._shards

    @property
    @override
    def moment_bytes(self) -> int:
        factored = sum(moment.rows.nbytes + moment.columns.nbytes for moment in self._moments)
        return super().moment_bytes + factored

    @override
    def update(
        self, learning_rate: float, gradient_divisor: torch.Tensor, skip: torch.Tensor
    ) -> None:
        """Update all states; collective over the ranks that hold parts of the same matrices."""
        self._updates += 1 - skip
        decay = (1 - self._updates.clamp(min=1) ** -DECAY_POWER).clamp(max=self._rule.beta2)
        for gradient in self._gradients:
            gradient.div_(gradient_divisor)
        self._update_moments(decay, skip)
        sums = self._squares()
        for member, (of_update, of_weights) in zip(self._members, sums, strict=True):
            rms_of_update, rms_of_weights = (
                (squares / member.counts).sqrt() for squares in (of_update, of_weights)
            )
            rate = learning_rate * member.settings.rate_factor
            steps = rate * rms_of_weights.clamp(min=SMALLEST_SCALE)
            steps /= (rms_of_update / CLIPPING).clamp(min=1)
            member.scale(self._gradients[member.index], steps)
            self._move(member, 1 - rate * member.settings.weight_decay, skip)

    @override
    def resume(self, updates: int) -> None:
        """Continue; ranks get the moments of a matrix from the one that has its first element."""
        self._updates.fill_(updates)
        for moment in self._moments:
            if not moment.is_first:
                moment.rows.zero_()
                moment.columns.zero_()
        self._add_over_owners([m.rows for m in self._moments] + [m.columns for m in self._moments])
        self.write_parameters()

    def _update_moments(self, decay: torch.Tensor, skip: torch.Tensor) -> None:
        """Update second moments, and divide the gradients by their square roots."""
        rows = [torch.zeros_like(moment.rows) for moment in self._moments]
        columns = [torch.zeros_like(moment.columns) for moment in self._moments]
        for moment, of_rows, of_columns in zip(self._moments, rows, columns, strict=True):
            moment.add_squares(self._gradients[moment.index], of_rows, of_columns)
        self._add_over_owners(rows + columns)
        dims = [moment.record.tensor_dim for moment in self._moments]
        divided = [r for dim, r in zip(dims, rows, strict=True) if dim == 1]
        divided += [c for dim, c in zip(dims, columns, strict=True) if dim == 0]
        self._add_over_tensor_ranks(divided)
        for moment, of_rows, of_columns in zip(self._moments, rows, columns, strict=True):
            _decay(moment.rows, of_rows + TINY * moment.columns.shape[1], decay, skip)
            _decay(moment.columns, of_columns + TINY * moment.rows.shape[0], decay, skip)
            moment.normalise(self._gradients[moment.index])
        for member in self._members:
            if member.moment is None:
                gradient = self._gradients[member.index][member.part]
                second = self._second_moments(member.index, member.part)
                _decay(second, gradient.square() + TINY, decay, skip)
                gradient *= second.rsqrt()

    def _squares(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the sums of squares of the update and of the weights, by matrix, per member."""
        tensors = self._gradients, self.masters
        sums = [m.squares_of(tensor[m.index]) for tensor in tensors for m in self._members]
        self._add_over_owners(sums)
        self._add_over_tensor_ranks(sums)
        middle = len(sums) // 2
        return list(zip(sums[:middle], sums[middle:], strict=True))

    def _move(self, member: _Member, kept: float, skip: torch.Tensor) -> None:
        """Move the weights of a member by its update, which lies in the gradients."""
        step = self._gradients[member.index][member.part]
        master = self.masters[member.index][member.part]
        if self.exp_avgs:
            momentum = self.exp_avgs[member.index][member.part]
            _decay(momentum, step, torch.full_like(skip, self._rule.beta1), skip)
            step = momentum
        master.copy_(torch.where(skip > 0, master, kept * master - step))

    @override
    def _without_second_moment(self, unit: Unit) -> int:
        return unit.matrix_elements(unit.optimizer_interval)

    def _add_over_owners(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum over the ranks that hold parts of the same matrices, in place."""
        for group in self._owners:
            sum_together(tensors, group, self._traffic, "factored_moments")

    def _add_over_tensor_ranks(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum over the ranks that split the same matrices, in place."""
        sum_together(tensors, self._tensor, self._traffic, "factored_moments")

    def _make_members(self, device: torch.device) -> Iterator[_Member]:
        moments = {moment.record: moment for moment in self._moments}
        for number, unit in enumerate(self._units):
            held = {index: interval for index, interval, _ in unit.held_parameters()}
            for index, record in enumerate(unit.records):
                own = held.get(index, Interval(unit.optimizer_interval.start, 0))
                moment, divided = moments.get(record), record.tensor_dim is not None
                count = torch.full((1,), float(_elements(record)), device=device)
                yield _Member(
                    number,
                    self.part(number, own),
                    Settings.of(record, self._rule),
                    count if moment is None else moment.counts,
                    divided or self._tensor.rank() == 0,
                    moment,
                )


def _decay(
    moment: torch.Tensor, new: torch.Tensor, decay: torch.Tensor, skip: torch.Tensor
) -> None:
    """Replace a moment by decay * moment + (1 - decay) * new, unless the update is skipped."""
    moment.copy_(torch.where(skip > 0, moment, decay * moment + (1 - decay) * new))


def _elements(record: ParameterRecord) -> int:
    """Return the number of elements of a parameter on all tensor ranks, without padding."""
    return sum(prod(placement.global_shape) for placement in record.placements)
