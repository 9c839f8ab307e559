"""The end of a step: the update, of which the device decides whether it is done.

The host need not wait for this choice before it submits the update.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from frontier_llm.device.transfer import HostCopy
from frontier_llm.protocols import ParameterRecord
from frontier_llm.sharding.sharded_states import ShardedStates


class UpdateChoice(NamedTuple):
    """What the update of a step does; tensors on the device."""

    divisor: torch.Tensor
    """[] fp32, the number by which the update divides gradients: their scale, multiplied by
    norm / limit if the norm exceeds the limit."""
    skip: torch.Tensor
    """[] fp32, 1 if nothing may be updated, else 0."""


def choose_update(
    squared_norm: torch.Tensor,
    scale: torch.Tensor | float,
    clip_norm: float | None,
    applies: torch.Tensor | None = None,
) -> UpdateChoice:
    """Compute the divisor of the gradients, and whether to skip the update.

    Args:
        squared_norm: [] fp64, the squared norm of the gradients as they were summed.
        scale: number by which they must be divided.
        clip_norm: largest norm, after this division, that is not clipped; None: no norm is clipped.
        applies: [] bool, whether the update is done if the norm is finite; None: it is.
    """
    norm = squared_norm.sqrt() / scale
    excess = (norm / clip_norm).clamp(min=1.0) if clip_norm else torch.ones_like(norm)
    finite = norm.isfinite() if applies is None else norm.isfinite() & applies
    return UpdateChoice((excess * scale).float(), finite.logical_not().float())


class Update:
    """Updates the states of a rank, and sends the updated parameters.

    `before_update` is called when the gradients are complete and nothing is updated yet.
    """

    def __init__(self, states: ShardedStates, before_update: Callable[[], None]) -> None:
        self._states, self._before_update = states, before_update

    def run(
        self,
        choice: UpdateChoice,
        numbers: torch.Tensor,
        learning_rate: float,
        left_out: Collection[ParameterRecord] = (),
    ) -> tuple[bool, list[float]]:
        """Submit the update, then wait for the choice. `end` must follow.

        On a GPU the device updates while the host waits. The choice depends on `numbers`, [n] fp64,
        equal on all ranks. Return whether the update was skipped, and the numbers.
        """
        copy = HostCopy(torch.cat([choice.skip.double().view(1), numbers]))
        self._before_update()
        self._states.update(learning_rate, choice.divisor, choice.skip, left_out)
        skipped, *values = copy.tolist()
        return bool(skipped), values

    def end(self, *, skipped: bool, saved: bool) -> None:
        """Send the updated parameters; see `ShardedStates.refresh` for `saved`."""
        if skipped:
            self._states.skip()
        if saved or not skipped:
            self._states.refresh(saved=saved)
