"""Divide the elements of units into groups with the same weight decay and learning rate.

A group is a list of ranges of the optimizer intervals of units. One call of a fused kernel updates
all ranges of a group.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch.optim.adamw import adamw

from frontier_llm.protocols import ParameterRecord
from frontier_llm.sharding.unit import Unit


class UpdateRule(Protocol):
    """The constants of an update. The section `optimizer` of a configuration has them."""

    @property
    def name(self) -> str:
        """`adamw`, `adamw_8bit`, `muon` or `adafactor`."""

    @property
    def momentum(self) -> float | None:
        """Factor of Muon's momentum; None = 0.95."""

    @property
    def beta1(self) -> float:
        """Decay rate of the first moment; Adafactor keeps none if it is 0."""

    @property
    def beta2(self) -> float:
        """Decay rate of the second moment; for Adafactor the limit to which it grows."""

    @property
    def epsilon(self) -> float:
        """Small number that is added to the square root of the second moment."""

    @property
    def weight_decay(self) -> float:
        """Coefficient of decoupled weight decay."""

    @property
    def decayed(self) -> Collection[str]:
        """Groups of parameters (`ParameterRecord.group`) that have weight decay."""

    @property
    def rate_factors(self) -> object:
        """An object with a factor of the learning rate for each group of parameters."""


@dataclass(frozen=True)
class Settings:
    """The settings of an element."""

    weight_decay: float
    rate_factor: float
    is_orthogonal: bool = False
    """Whether Muon updates the element."""

    @classmethod
    def of(cls, record: ParameterRecord, rule: UpdateRule) -> "Settings":
        """Return the settings of a parameter.

        A step multiplies a weight by 1 - rate * weight decay. The factor of the record, with which
        the rate changes with the width of the model (muP), must not change this product (Tensor
        Programs V, arXiv:2203.03466, appendix B.3), so the weight decay is divided by it.
        """
        decay = record.weight_decay
        if decay is None:
            decay = rule.weight_decay / record.rate_factor if record.group in rule.decayed else 0.0
        factor: float = getattr(rule.rate_factors, record.group)
        is_orthogonal = rule.name == "muon" and record.is_matrix_of_layer
        return cls(decay, factor * record.rate_factor, is_orthogonal)


@dataclass(frozen=True)
class UpdateGroup:
    """The ranges of this rank's optimizer states that have the same settings."""

    settings: Settings
    ranges: Sequence[tuple[int, slice]]
    """(index of the unit, range of the unit's optimizer interval). None is empty."""
    step_counters: list[torch.Tensor]
    """[] fp32 per range, on the device: number of updates."""

    def of_unit(self, index: int) -> "UpdateGroup":
        """Return the group of only the ranges of unit `index`; there may be none."""
        return self._only([place for place, (unit, _) in enumerate(self.ranges) if unit == index])

    def by_parameter(self, units: Sequence[Unit]) -> "UpdateGroup":
        """Return a group whose ranges end where a parameter ends, except for the padding."""
        ranges, counters = [], []
        for (index, part), counter in zip(self.ranges, self.step_counters, strict=True):
            own = units[index].optimizer_interval.start
            starts = (start - own for start in sorted(set(units[index].layout.starts)))
            borders = [part.start, *(s for s in starts if part.start < s < part.stop), part.stop]
            ranges += [(index, slice(*pair)) for pair in pairwise(borders)]
            counters += [counter.clone() for _ in borders[1:]]
        return UpdateGroup(self.settings, ranges, counters)

    def without(
        self, units: Sequence[Unit], left_out: Collection[ParameterRecord]
    ) -> "UpdateGroup":
        """Return the group without the ranges of some parameters; `by_parameter` comes first."""
        kept = [
            place
            for place, (index, part) in enumerate(self.ranges)
            if units[index].record_at(part.start) not in left_out
        ]
        return self._only(kept)

    def _only(self, kept: Sequence[int]) -> "UpdateGroup":
        counters = [self.step_counters[place] for place in kept]
        return UpdateGroup(self.settings, [self.ranges[place] for place in kept], counters)

    def views(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a view of each range of tensors, which cover one optimizer interval per unit."""
        return [tensors[index][part] for index, part in self.ranges]


def update_groups(units: Sequence[Unit], rule: UpdateRule) -> list[UpdateGroup]:
    """Return the groups of this rank, of trainable units."""
    found: dict[Settings, list[tuple[int, slice]]] = {}
    for index, unit in enumerate(units):
        own = unit.optimizer_interval
        for settings, start, stop in _ranges(unit, rule):
            first, end = max(start, own.start) - own.start, min(stop, own.stop) - own.start
            if first < end:
                found.setdefault(settings, []).append((index, slice(first, end)))
    device = units[0].buffer.device if units else None
    return [
        UpdateGroup(settings, ranges, [torch.zeros((), device=device) for _ in ranges])
        for settings, ranges in found.items()
    ]


def update_ranges(
    rule: UpdateRule,
    group: UpdateGroup,
    tensors: Sequence[list[torch.Tensor]],
    learning_rate: float,
    gradient_divisor: torch.Tensor,
    skip: torch.Tensor,
) -> None:
    """Update the ranges of a group by one call of torch's fused kernel; see `Optimizer.update`.

    The tensors are four lists with a tensor per range: master weights, gradients (which are divided
    in place), first moments and second moments.
    """
    masters, gradients, exp_avgs, exp_avg_sqs = tensors
    if not masters:
        return
    adamw(
        masters,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs=[],
        state_steps=group.step_counters,
        fused=True,
        grad_scale=gradient_divisor,
        found_inf=skip,
        amsgrad=False,
        beta1=rule.beta1,
        beta2=rule.beta2,
        lr=learning_rate * group.settings.rate_factor,
        weight_decay=group.settings.weight_decay,
        eps=rule.epsilon,
        maximize=False,
    )


def _ranges(unit: Unit, rule: UpdateRule) -> Iterator[tuple[Settings, int, int]]:
    """Yield (settings, start, stop) of the ranges of a unit's buffer, the longest possible ones.

    The padding after norms and biases belongs to the last range, so that all ranges but the last
    end where a parameter ends. It stays zero.
    """
    layout = unit.layout
    in_order = sorted(range(len(unit.records)), key=layout.starts.__getitem__)
    settings, start = Settings.of(unit.records[in_order[0]], rule), 0
    for index in in_order[1:]:
        following = Settings.of(unit.records[index], rule)
        if following != settings:
            yield settings, start, layout.starts[index]
            settings, start = following, layout.starts[index]
    yield settings, start, layout.used if layout.used == layout.decayed else layout.size
