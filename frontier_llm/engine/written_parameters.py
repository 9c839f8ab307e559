"""Notices what a user writes to parameters, and makes it the new master weights."""

from frontier_llm.errors import TrainingError
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

        All ranks must have written the same.

        Raises:
            TrainingError: parameters were written to that are not in memory any more.
        """
        for unit, before in self._counts.items():
            self._counts[unit] = after = _writes(unit)
            pairs = enumerate(zip(before, after, strict=True))
            written = {index for index, (old, new) in pairs if old != new}
            if not written:
                continue
            if not unit.buffer.untyped_storage().nbytes():
                raise TrainingError(
                    f"parameters of {unit.name} were written to in a forward or backward pass, but "
                    "they are sharded, so that the values are lost\n  do: write them in `with "
                    "states.gathered():`, or call shard with params=1"
                )
            if unit.is_sharded:
                unit.shard.copy_(unit.part(unit.buffer, unit.params_interval))
            if unit.is_trainable:
                self._states.take_parameters(unit, written)


def _writes(unit: Unit) -> list[int]:
    return [record.parameter._version for record in unit.records]
