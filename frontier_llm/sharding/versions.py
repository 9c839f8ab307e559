"""Versions: parameters are a copy of the master weights, and must not be an old one.

torch counts the writes to a tensor, through all of its views. The count at the time when a unit's
parameters were made from its masters is kept, so a later write is noticed when they are read:
after an update, a loaded checkpoint or an edit that nobody announced.
"""

from collections.abc import Mapping

import torch

from frontier_llm.errors import TrainingError
from frontier_llm.sharding.unit import Unit


class Versions:
    """Which state of its master weights each unit's parameters were made from."""

    def __init__(self) -> None:
        self._masters: dict[Unit, torch.Tensor] = {}
        self._made: dict[Unit, int] = {}

    def follow(self, masters: Mapping[Unit, torch.Tensor]) -> None:
        """Watch master weights, from which the parameters have just been made."""
        self._masters = dict(masters)
        for unit in masters:
            self.made(unit)

    def made(self, unit: Unit) -> None:
        """Note that a unit's parameters are being made from its masters as they are now."""
        self._made[unit] = self._masters[unit]._version

    def check(self, unit: Unit) -> None:
        """Refuse parameters that are older than their masters.

        Raises:
            TrainingError: the masters were written to since.
        """
        master = self._masters.get(unit)
        if master is not None and master._version != self._made[unit]:
            raise TrainingError(
                f"the master weights of {unit.name} were changed, but not the parameters that are "
                "made from them: call ShardedStates.adopt after writing to shards"
            )
