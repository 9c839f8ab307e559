"""The face of this package: all model states of one rank, through one step after the other."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from frontier_llm.collectives.blockwise import BlockKernels
from frontier_llm.collectives.reduce import all_reduce
from frontier_llm.collectives.transport import Transport
from frontier_llm.config.optimizer import OptimizerConfig
from frontier_llm.geometry.partition import Factors
from frontier_llm.protocols import ParameterRecord, StateShard
from frontier_llm.sharding.adamw import AdamW
from frontier_llm.sharding.grad_norm import GradNorm
from frontier_llm.sharding.gradients import Gradients
from frontier_llm.sharding.groups import StateGroups
from frontier_llm.sharding.parameters import Parameters
from frontier_llm.sharding.unit import Unit, make_units
from frontier_llm.sharding.versions import Versions


class ShardedStates:
    """Parameters, gradients, master weights and moments of one rank.

    A step is: `begin_step`, the forward and backward passes (all but the last backward inside
    `accumulating()`), `finish_backward`, `squared_norm`, and `step` unless it is skipped. Around
    whatever reads parameters stand `acquire` and `release`, by the names of units.

    The loss must be divided by the number of replicas before the backward pass: gradients are
    added over them, not averaged.
    """

    def __init__(
        self,
        records: Sequence[ParameterRecord],
        groups: StateGroups,
        transport: Transport,
        optimizer: OptimizerConfig,
        units_in_flight: int = 2,
        *,
        feedback: bool = False,
    ) -> None:
        """Take over the parameters.

        Args:
            records: this rank's parameters, initialised, in the order of the forward pass. Their
                storage is replaced.
            groups: along which states are cut.
            transport: sends parts of states, in the formats of each step.
            optimizer: the update rule's constants.
            units_in_flight: units whose parameters are whole, and reductions that are under way,
                at most.
            feedback: whether what rounding loses of gradients between nodes is kept.
        """
        self._groups, self._transport = groups, transport
        self._units = make_units(records, groups.factors, groups.data_rank)
        trained = [unit for unit in self._units if unit.is_trainable]
        versions = Versions()
        self._parameters = Parameters(self._units, groups, transport, units_in_flight, versions)
        self._gradients = Gradients(
            trained, groups, transport, units_in_flight, self._parameters.release, feedback=feedback
        )
        own = [self._gradients.of(unit) for unit in trained]
        self._trained = list(zip(trained, own, strict=True))
        is_refreshed = groups.b is not None or groups.c is not None
        self._adamw = AdamW(
            trained, own, optimizer, own_masters=is_refreshed and transport.rounds_refresh
        )
        versions.follow(dict(zip(trained, self._adamw.masters, strict=True)))
        self._norm = GradNorm(trained, own)
        self._partial = self._intervals(lambda record: record.tensor_partial)
        self._tied = self._intervals_by_name(lambda record: record.tied)

    @property
    def kernels(self) -> BlockKernels:
        """Which implementation of block quantisation is used."""
        return self._transport.kernels

    @property
    def factors(self) -> Factors:
        """Over how many ranks each state is cut."""
        return self._groups.factors

    def begin_step(self, step: int) -> None:
        """Start a step, counted from 1, with empty gradients; its number decides the formats."""
        self._transport.begin_step(step)
        self._parameters.begin_step()
        self._gradients.begin_step()

    def acquire(self, units: Iterable[str], *, backward: bool = False) -> None:
        """Make units' parameters whole and up to date; what follows in this step is prefetched.

        Collective over the ranks that hold their parts.

        Args:
            units: their names.
            backward: whether a backward pass reads them: its gathers have a format of their own.

        Raises:
            TrainingError: master weights were written to, and `adopt` was not called.
        """
        for unit in self._named(units):
            self._parameters.acquire(unit, backward=backward)

    def release(self, units: Iterable[str]) -> None:
        """Let go of units' whole parameters."""
        for unit in self._named(units):
            self._parameters.release(unit)

    def begin_backward(self) -> None:
        """Mark that a backward pass begins (and that the one before is over)."""
        self._gradients.begin_backward()

    def accumulating(self) -> AbstractContextManager[None]:
        """Wrap the backward passes that are not the last of the step."""
        return self._gradients.accumulating()

    def finish_backward(self) -> None:
        """Complete all gradients: over replicas, tensor ranks and tied copies.

        Collective over the reduction groups; blocks.
        """
        self._gradients.finish()
        self._parameters.end_step()
        self._add_partial()
        self._add_tied()

    def squared_norm(self) -> torch.Tensor:
        """Return [] fp64: this rank's share; the sum over all ranks is the squared norm.

        Ranks that hold the same optimizer interval give equal shares of it.
        """
        return self._norm.squared() / self._groups.replicas

    def step(self, learning_rate: float, gradient_divisor: torch.Tensor) -> None:
        """Update this rank's intervals, and start to refresh the parameters of all ranks.

        Collective over the ranks that hold parts of the same parameters; returns before the
        refresh is over: `acquire` waits for it, unit by unit.

        Args:
            learning_rate: of this step.
            gradient_divisor: [] fp32; the gradients are divided by it.
        """
        self._adamw.step(learning_rate, gradient_divisor)
        self._parameters.refresh()
        self._transport.begin_next_step()
        self._parameters.gather_first()

    def gradients(self) -> Iterator[tuple[ParameterRecord, int, torch.Tensor]]:
        """Yield what this rank holds of each gradient.

        Yields:
            (record, first element in the flattened parameter, [elements] fp32). Read only.
        """
        for unit, gradient in self._trained:
            for index, interval, start in unit.held_parameters():
                yield unit.records[index], start, unit.part(gradient, interval, unit.optimizer)

    def shards(self) -> Iterator[StateShard]:
        """Yield what this rank holds of the optimizer states, parameter by parameter."""
        for position, (unit, _) in enumerate(self._trained):
            states = [
                tensors[position]
                for tensors in (self._adamw.masters, self._adamw.exp_avgs, self._adamw.exp_avg_sqs)
            ]
            for index, interval, start in unit.held_parameters():
                parts = (unit.part(state, interval, unit.optimizer) for state in states)
                yield StateShard(unit.records[index], start, *parts)

    def settle(self) -> None:
        """Wait until no collective reads or writes states: then `shards` may be overwritten.

        Collective over the ranks that hold parts of the same parameters.
        """
        self._parameters.settle()
        self._parameters.end_step()

    def drain(self) -> None:
        """Wait until nothing is being sent; what has been gathered stays for the next step.

        Between steps. Collective over the ranks that hold parts of the same parameters.
        """
        self._parameters.drain()

    def adopt(self, updates: int, step: int) -> None:
        """Go on from `shards` that were overwritten: bring all parameters up to date with them.

        Collective over the ranks that hold parts of the same parameters.

        Args:
            updates: that the new states have seen.
            step: of the run that they belong to: more, if some were skipped.
        """
        self._adamw.resume(updates)
        self._gradients.forget_errors()
        self._parameters.end_step()
        self._transport.begin_step(max(1, step))
        self._parameters.refresh()
        self._parameters.settle()
        self._transport.begin_next_step()

    def skip(self) -> None:
        """Take no step: the gradients are not finite, nor is what rounding them has left."""
        self._gradients.forget_errors()

    def parameters(self) -> Iterator[tuple[ParameterRecord, torch.Tensor]]:
        """Yield every parameter, whole and as exact as its master weights.

        Collective over the ranks that hold their parts: all of them draw all of them. The formats
        of `transport` do not matter here, and what training reads is not touched.
        """
        self._parameters.settle()
        masters = {
            unit: master
            for (unit, _), master in zip(self._trained, self._adamw.masters, strict=True)
        }
        for unit in self._units:
            whole = self._parameters.exact(unit, masters.get(unit))
            for index, record in enumerate(unit.records):
                yield record, unit.view(whole, index)

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that stay allocated between steps, by category.

        `gathered` is apart: the most that whole parameters held at once since the beginning; it
        is zero where parameters are not cut. Where something travels encoded, `messages` are the
        buffers for that, used again and again, and `feedback` the rounding errors that are kept.
        """
        held = sum(unit.shard.numel() * unit.shard.element_size() for unit in self._units)
        elements = sum(master.numel() for master in self._adamw.masters)
        categories = {
            "parameters": held,
            "gradients": self._gradients.memory_bytes(),
            "master": 4 * elements if self._adamw.own_masters else 0,
            "moments": 8 * elements,
            "gathered": self._parameters.peak_gathered_bytes,
        }
        if self._transport.encodes:
            categories["feedback"] = self._gradients.feedback_bytes()
            categories["messages"] = self._transport.pool.allocated_bytes
        return categories

    def _named(self, names: Iterable[str]) -> list[Unit]:
        """Return the units of these names, and what is frozen of them."""
        wanted = set(names)
        return [unit for unit in self._units if unit.name.removesuffix(" (frozen)") in wanted]

    def _add_partial(self) -> None:
        """Add up gradients of which each tensor rank saw only its part of the sequence.

        Tensor ranks of one data rank hold the same intervals, so the parts need no gathering.
        """
        if not self._partial:
            return
        together = torch.cat(self._partial)
        all_reduce(together, self._groups.tensor, self._transport.traffic, "sequence_norms").wait()
        sizes = [gradient.numel() for gradient in self._partial]
        for gradient, summed in zip(self._partial, together.split(sizes), strict=True):
            gradient.copy_(summed)

    def _add_tied(self) -> None:
        """Add up gradients of which other pieces of the pipeline hold copies, on this rank or not.

        All copies lie in units of one layout, so their ranks hold the same intervals.
        """
        for name, copies in self._tied.items():
            total = copies[0] if len(copies) == 1 else torch.stack(copies).sum(dim=0)
            group = self._groups.tied[name]
            if group is not None:
                all_reduce(total, group, self._transport.traffic, "tied_copies").wait()
            for gradient in copies:
                gradient.copy_(total)

    def _intervals(self, wanted: Callable[[ParameterRecord], bool]) -> list[torch.Tensor]:
        return [gradient for record, _, gradient in self.gradients() if wanted(record)]

    def _intervals_by_name(
        self, wanted: Callable[[ParameterRecord], bool]
    ) -> dict[str, list[torch.Tensor]]:
        found: dict[str, list[torch.Tensor]] = {}
        for record, _, gradient in self.gradients():
            if wanted(record):
                found.setdefault(record.name, []).append(gradient)
        return found
