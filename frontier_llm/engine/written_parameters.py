"""Notices what a user writes to parameters, and makes it the new master weights."""

from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.sharding.unit import Unit


class WrittenParameters:
    """Compares the number of writes to each parameter.

    torch counts them. Writes of `sharding` are to the buffers, whose count is another one. Writes
    through `parameter.data` are not counted.
    """

    def __init__(self, states: ShardedStates) -> None:
        self._states = states
        self._counts = {unit: _writes(unit) for unit in states.all_units}

    def take(self) -> None:
        """Take what was written since the last call.

        All ranks must have written the same. The parameters of all written units are in memory.
        """
        for unit, before in self._counts.items():
            self._counts[unit] = _writes(unit)
            if self._counts[unit] == before:
                continue
            if unit.is_sharded:
                unit.shard.copy_(unit.part(unit.buffer, unit.params_interval))
            if unit.is_trainable:
                self._states.take_parameters(unit)


def _writes(unit: Unit) -> list[int]:
    return [record.parameter._version for record in unit.records]
