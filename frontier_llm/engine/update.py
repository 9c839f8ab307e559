"""The end of a step: the update, and what all ranks agreed on before it."""

from collections.abc import Callable, Collection

import torch

from frontier_llm.device.transfer import HostCopy
from frontier_llm.engine.update_choice import UpdateChoice
from frontier_llm.protocols import ParameterRecord
from frontier_llm.sharding.sharded_states import ShardedStates


class Update:
    """Updates the states of a rank, and sends the updated parameters."""

    def __init__(self, states: ShardedStates, before_update: Callable[[], None]) -> None:
        """Initialise.

        Args:
            states: the states.
            before_update: called when the gradients are complete and nothing is updated yet.
        """
        self._states, self._before_update = states, before_update

    def run(
        self,
        choice: UpdateChoice,
        numbers: torch.Tensor,
        learning_rate: float,
        left_out: Collection[ParameterRecord] = (),
    ) -> tuple[bool, list[float]]:
        """Submit the update, then wait for the choice. `end` must follow.

        On a GPU the device updates while the host waits.

        Args:
            choice: divisor of the gradients, and whether to skip the update.
            numbers: [n] fp64, what the choice depends on; equal on all ranks.
            learning_rate: learning rate of this step.
            left_out: parameters that are not updated.

        Returns:
            Whether the update was skipped, and the numbers.
        """
        copy = HostCopy(torch.cat([choice.skip.double().view(1), numbers]))
        self._before_update()
        self._states.update(learning_rate, choice.divisor, choice.skip, left_out)
        skipped, *values = copy.tolist()
        return bool(skipped), values

    def end(self, *, skipped: bool, saved: bool) -> None:
        """Send the updated parameters.

        Args:
            skipped: whether the update was skipped.
            saved: whether the states are saved after this step (`ShardedStates.refresh`).
        """
        if skipped:
            self._states.skip()
        if saved or not skipped:
            self._states.refresh(saved=saved)
