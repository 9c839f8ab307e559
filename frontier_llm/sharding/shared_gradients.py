"""Gradients of parameters of which other ranks of a replica hold copies."""

from collections.abc import Iterable

import torch

from frontier_llm.collectives.primitives import all_reduce
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.protocols import ParameterRecord
from frontier_llm.sharding.unit import StateGroups


class SharedGradients:
    """Adds up the gradients that several tensor ranks or stages have computed of one parameter."""

    def __init__(
        self,
        gradients: Iterable[tuple[ParameterRecord, int, torch.Tensor]],
        groups: StateGroups,
        traffic: Traffic,
    ) -> None:
        """Select the gradients; the arguments are those of `ShardedStates.gradients` and groups."""
        self._groups, self._traffic = groups, traffic
        self._partial: list[torch.Tensor] = []
        self._tied: dict[str, list[torch.Tensor]] = {}
        for record, _, gradient in gradients:
            if record.tensor_partial:
                self._partial.append(gradient)
            if record.tied:
                self._tied.setdefault(record.name, []).append(gradient)

    def add(self) -> None:
        """Replace the gradients by their sums. Collective over the ranks that hold copies."""
        self._add_partial()
        self._add_tied()

    def _add_partial(self) -> None:
        """Sum gradients of norms and biases over tensor ranks; each rank has those of its tokens.

        The tensor ranks of one data rank hold the same intervals, so an all-reduce of these
        intervals is enough.
        """
        if not self._partial:
            return
        joined, group = torch.cat(self._partial), self._groups.tensor_group
        all_reduce(joined, group, self._traffic, "sequence_norms").wait()
        sizes = [gradient.numel() for gradient in self._partial]
        for gradient, summed in zip(self._partial, joined.split(sizes), strict=True):
            gradient.copy_(summed)

    def _add_tied(self) -> None:
        """Sum the gradients of all copies of a parameter, on this rank and on other stages.

        All copies lie in units of the same layout, so their ranks hold the same intervals.
        """
        for name, copies in self._tied.items():
            total = copies[0] if len(copies) == 1 else torch.stack(copies).sum(dim=0)
            group = self._groups.tied_groups[name]
            if group is not None:
                all_reduce(total, group, self._traffic, "tied_copies").wait()
            for gradient in copies:
                gradient.copy_(total)
