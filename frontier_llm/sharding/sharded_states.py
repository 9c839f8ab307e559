"""The face of this package: all model states of one rank, through one step after the other."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from frontier_llm.collectives.handle import Handle
from frontier_llm.collectives.reduce import all_reduce
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.config.optimizer import OptimizerConfig
from frontier_llm.protocols import ParameterRecord
from frontier_llm.sharding.adamw import AdamW
from frontier_llm.sharding.flat_buffer import FlatUnit, make_units
from frontier_llm.sharding.grad_norm import GradNorm
from frontier_llm.sharding.gradients import Gradients


@dataclass(frozen=True)
class ReductionGroups:
    """The groups over which gradients are added up."""

    data: dist.ProcessGroup
    """Ranks with the same part of the model and other samples."""
    tensor: dist.ProcessGroup
    """Ranks that cut the same matrices: for partial gradients under sequence parallel."""
    embedding: dist.ProcessGroup | None
    """First and last stage, for a tied embedding; None on the stages between."""


class ShardedStates:
    """Parameters, gradients, master weights and moments of one rank.

    A step is: `begin_step`, the forward and backward passes (all but the last inside
    `accumulating()`), `finish_backward`, `squared_norm`, and `step` unless it is skipped.

    The loss must be divided by the number of replicas before the backward pass: gradients are
    added over them, not averaged.
    """

    def __init__(
        self,
        records: Sequence[ParameterRecord],
        groups: ReductionGroups,
        traffic: Traffic,
        optimizer: OptimizerConfig,
    ) -> None:
        self._groups, self._traffic = groups, traffic
        self._units = make_units(records)
        self._gradients = Gradients(self._units, self._reduce)
        self._adamw = AdamW(self._units, optimizer)
        self._norm = GradNorm(self._units)
        self._partial = self._gradient_views(lambda record: record.tensor_partial)
        self._tied = self._gradient_views(lambda record: record.tied)

    def begin_step(self) -> None:
        """Start a step with empty gradients."""
        self._gradients.begin_step()

    def accumulating(self) -> AbstractContextManager[None]:
        """Wrap the backward passes that are not the last of the step."""
        return self._gradients.accumulating()

    def finish_backward(self) -> None:
        """Complete all gradients: over replicas, tensor ranks and tied copies.

        Collective over the reduction groups; blocks.
        """
        self._gradients.finish()
        self._add_partial()
        for gradient in self._tied:
            assert self._groups.embedding is not None
            all_reduce(gradient, self._groups.embedding, self._traffic, "tied_embedding").wait()

    def squared_norm(self) -> torch.Tensor:
        """Return [] fp64: this rank's share; the sum over all ranks is the squared norm.

        Every replica has the whole gradient, so each gives an equal share of it.
        """
        return self._norm.squared() / dist.get_world_size(self._groups.data)

    def step(self, learning_rate: float, gradient_divisor: torch.Tensor) -> None:
        """Update all parameters.

        Args:
            learning_rate: of this step.
            gradient_divisor: [] fp32; the gradients are divided by it.
        """
        self._adamw.step(learning_rate, gradient_divisor)

    def gradients(self) -> Iterator[tuple[ParameterRecord, torch.Tensor]]:
        """Yield each parameter's accumulated gradient, fp32 in the parameter's shape. Read only."""
        for unit in self._units:
            for index, record in enumerate(unit.records):
                yield record, unit.view(unit.gradients, index)

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that stay allocated between steps, by category."""
        elements = sum(unit.layout.size for unit in self._units)
        compute = sum(u.parameters.numel() * u.parameters.element_size() for u in self._units)
        own_master = self._units and self._adamw.masters[0] is not self._units[0].parameters
        return {
            "parameters": compute,
            "gradients": 4 * elements,
            "master": 4 * elements if own_master else 0,
            "moments": 8 * elements,
        }

    def _reduce(self, unit: FlatUnit) -> Handle:
        return all_reduce(unit.gradients, self._groups.data, self._traffic, "gradients")

    def _add_partial(self) -> None:
        """Add up gradients of which each tensor rank saw only its part of the sequence."""
        if not self._partial:
            return
        together = torch.cat([gradient.flatten() for gradient in self._partial])
        all_reduce(together, self._groups.tensor, self._traffic, "sequence_norms").wait()
        sizes = [gradient.numel() for gradient in self._partial]
        for gradient, whole in zip(self._partial, together.split(sizes), strict=True):
            gradient.copy_(whole.view_as(gradient))

    def _gradient_views(self, wanted: Callable[[ParameterRecord], bool]) -> list[torch.Tensor]:
        return [gradient for record, gradient in self.gradients() if wanted(record)]
