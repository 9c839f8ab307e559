"""What all optimizers have in common: the fp32 master weights of a rank, and the interface."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from frontier_llm.collectives.transport import Transport
from frontier_llm.geometry.partition import Interval
from frontier_llm.protocols import State, StateShard
from frontier_llm.sharding.unit import StateGroups, Unit
from frontier_llm.sharding.update_groups import UpdateRule


@dataclass(frozen=True)
class Setup:
    """What an optimizer is made of."""

    units: Sequence[Unit]
    """The trainable units."""
    gradients: Sequence[torch.Tensor]
    """Per unit, [n / o] fp32; an update reads them and overwrites them."""
    rule: UpdateRule
    groups: StateGroups
    transport: Transport
    separate_masters: bool
    """Whether master weights are a copy even if the parameters are fp32. A copy is needed if the
    parameters are rounded when they are sent to the other ranks."""


class Optimizer(ABC):
    """The optimizer states of a rank, one interval of n/o elements of each unit, and their update.

    In shapes, n is the number of elements of a unit's flat buffer, and o the number of ranks over
    which its optimizer states are divided. Master weights begin as the parameters, and all other
    states as zeros. If the model computes in fp32, the parameters of the interval are the master
    weights, and no copy is stored unless it is needed.

    Attributes:
        masters: per unit, [n / o] fp32, the master weights.
        exp_avgs: per unit, [n / o] fp32, first moments or momentum; empty = none are kept in fp32.
        exp_avg_sqs: per unit, second moments in fp32, of the elements that have one of their own.
    """

    def __init__(self, setup: Setup) -> None:
        self._units, self._gradients, self._rule = setup.units, setup.gradients, setup.rule
        self._parameters = [unit.shard_part(unit.optimizer_interval) for unit in setup.units]
        self.masters = [
            parameters.to(torch.float32, copy=setup.separate_masters)
            for parameters in self._parameters
        ]
        self.exp_avgs: list[torch.Tensor] = []
        self.exp_avg_sqs: list[torch.Tensor] = []

    def states_of(self, index: int, interval: Interval) -> Mapping[str, State]:
        """Return the states of an interval of the buffer of unit `index`, by name.

        The interval lies in the optimizer interval of this rank, and inside one parameter. Each
        state has [elements], the first is `master`. Checkpoints store the states under these names,
        in this order.
        """
        part = self.part(index, interval)
        states = {"master": self.masters[index][part]}
        if self.exp_avgs:
            states["exp_avg"] = self.exp_avgs[index][part]
        if part.start >= self._without_second_moment(self._units[index]):
            states["exp_avg_sq"] = self._second_moments(index, part)
        return states

    def writable_states_of(self, index: int, interval: Interval) -> Mapping[str, State]:
        """Return fp32 tensors in place of `states_of`, which the caller may overwrite.

        `resume` must follow: it encodes what the caller has written.
        """
        return self.states_of(index, interval)

    def more_shards(self) -> Iterator[StateShard]:
        """Yield states that do not belong to single elements of the parameters, for checkpoints."""
        return iter(())

    @property
    def moment_bytes(self) -> int:
        """Bytes of all states but the master weights."""
        return sum(moment.nbytes for moment in (*self.exp_avgs, *self.exp_avg_sqs))

    @property
    def saved_bytes(self) -> int:
        """Bytes of all states in a checkpoint, padding included."""
        return sum(master.nbytes for master in self.masters) + self.moment_bytes

    def allocated_bytes(self) -> dict[str, int]:
        """Return the bytes of master weights that are not the parameters, and of moments."""
        pairs = zip(self.masters, self._parameters, strict=True)
        separate = any(master is not parameters for master, parameters in pairs)
        masters = sum(master.nbytes for master in self.masters)
        return {"master": masters if separate else 0, "moments": self.moment_bytes}

    @abstractmethod
    def update(
        self, learning_rate: float, gradient_divisor: torch.Tensor, skip: torch.Tensor
    ) -> None:
        """Update all states. `write_parameters` must follow, unless the update is skipped.

        May be collective over the ranks that hold parts of the same matrices.

        Args:
            learning_rate: of this step; groups of parameters multiply it by their factors.
            gradient_divisor: [] fp32 on the device; gradients are divided by it first.
            skip: [] fp32 on the device; if 1, nothing changes.
        """

    @abstractmethod
    def resume(self, updates: int) -> None:
        """Continue from states that the caller has overwritten, after so many updates.

        May be collective over the ranks that hold parts of the same units.
        """

    def write_parameters(self) -> None:
        """Write this rank's interval of the parameters from the masters."""
        for master, parameters in zip(self.masters, self._parameters, strict=True):
            if master is not parameters:
                parameters.copy_(master)

    def read_parameters(self, index: int, interval: Interval) -> None:
        """Write an interval of the masters of unit `index` from its parameters."""
        if self.masters[index] is not self._parameters[index]:
            part = self.part(index, interval)
            self.masters[index][part].copy_(self._parameters[index][part])

    def part(self, index: int, interval: Interval) -> slice:
        """Return where an interval of the buffer of unit `index` lies in this rank's states."""
        start = interval.start - self._units[index].optimizer_interval.start
        return slice(start, start + interval.length)

    def _without_second_moment(self, unit: Unit) -> int:
        """Return how many elements have no second moment of their own, from the first one on."""
        return 0

    def _zero_second_moments(self) -> list[torch.Tensor]:
        pairs = zip(self.masters, self._units, strict=True)
        return [m.new_zeros(m.numel() - self._without_second_moment(unit)) for m, unit in pairs]

    def _second_moments(self, index: int, part: slice) -> torch.Tensor:
        first = self._without_second_moment(self._units[index])
        return self.exp_avg_sqs[index][part.start - first : part.stop - first]
