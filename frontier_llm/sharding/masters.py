"""The fp32 master weights of one rank."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from frontier_llm.geometry.partition import Interval
from frontier_llm.protocols import State, StateShard
from frontier_llm.sharding.unit import Unit


class Masters:
    """Master weights: one interval of n/o elements of each unit.

    In shapes, n is the number of elements of a unit's flat buffer, and o the number of ranks over
    which its optimizer states are divided. If the model computes in fp32, the parameters of this
    interval are the master weights and no copy is stored. A copy is needed if the parameters are
    rounded when they are sent to the other ranks.

    Attributes:
        masters: per unit, [n / o] fp32, the master weights.
    """

    def __init__(self, units: Sequence[Unit], *, separate: bool) -> None:
        """Initialise master weights from the parameters.

        Args:
            units: the trainable units.
            separate: whether master weights are a copy even if the parameters are fp32.
        """
        self._units = units
        self._parameters = [unit.shard_part(unit.optimizer_interval) for unit in units]
        self.masters = [
            parameters.to(torch.float32, copy=separate) for parameters in self._parameters
        ]

    @property
    def has_separate_masters(self) -> bool:
        """Whether master weights are stored in addition to the parameters."""
        return any(m is not p for m, p in zip(self.masters, self._parameters, strict=True))

    @property
    def moment_bytes(self) -> int:
        """Bytes of all states but the master weights."""
        raise NotImplementedError

    @property
    def saved_bytes(self) -> int:
        """Bytes of all states in a checkpoint, padding included."""
        return sum(master.nbytes for master in self.masters) + self.moment_bytes

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

    def states_of(self, index: int, interval: Interval) -> Mapping[str, State]:
        """Return the states of an interval of unit `index`, by name; see `Optimizer`."""
        raise NotImplementedError

    def writable_states_of(self, index: int, interval: Interval) -> Mapping[str, State]:
        """Return tensors for the states of an interval of unit `index`; see `Optimizer`."""
        return self.states_of(index, interval)

    def more_shards(self) -> Iterator[StateShard]:
        """Yield states that do not belong to single elements of the parameters: none."""
        return iter(())

    def part(self, index: int, interval: Interval) -> slice:
        """Return where an interval of the buffer of unit `index` lies in this rank's states."""
        start = interval.start - self._units[index].optimizer_interval.start
        return slice(start, start + interval.length)
