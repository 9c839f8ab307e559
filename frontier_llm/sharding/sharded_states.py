"""The interface of this package: `ShardedStates`, all model states of one rank.

engine/update.py calls it for each step, engine/hooks.py before and after each module, and the
checkpoints read and write its shards.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch

from frontier_llm.collectives.primitives import all_reduce, sum_together
from frontier_llm.collectives.transport import Transport
from frontier_llm.geometry.formats import Feedback
from frontier_llm.geometry.partition import Factors
from frontier_llm.protocols import ParameterRecord, StateShard
from frontier_llm.sharding.adafactor import Adafactor
from frontier_llm.sharding.adamw import AdamW
from frontier_llm.sharding.adamw_8bit import AdamW8bit
from frontier_llm.sharding.gradients import Gradients
from frontier_llm.sharding.muon import Muon
from frontier_llm.sharding.optimizer_states import Optimizer, Setup
from frontier_llm.sharding.parameters import Parameters
from frontier_llm.sharding.unit import StateGroups, Unit, group_records
from frontier_llm.sharding.update_groups import UpdateRule

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
    "adamw_8bit": AdamW8bit,
    "muon": Muon,
    "adafactor": Adafactor,
}
"""By the name in the update rule."""

NORM_PIECE = 1 << 16
"""Elements that a CPU adds up in fp32; the sums of such pieces are added in fp64."""


def squared_norm(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [] fp64: the squared norm of all elements of `parts`, [any] fp32 each.

    GPUs add up in a tree. A CPU adds one element after another, which loses 4e-4 of the norm of ten
    million elements in fp32, and 1e-2 of a hundred million.
    """
    if parts[0].device.type == "cpu":
        parts = [piece for part in parts for piece in part.split(NORM_PIECE)]
    norms = torch.stack([torch.linalg.vector_norm(part) for part in parts])
    return norms.double().square().sum()


class ShardedStates:
    """Parameters, gradients, master weights and moments of one rank.

    A step is: `begin_step`; the forward and backward passes; `finish_backward`; `squared_norm`;
    `update`; `refresh`, or `skip`. Code that reads parameters must call `acquire` before and
    `release` after, with the units that hold them.

    The loss must be divided by the number of replicas before the backward pass: gradients are
    summed over replicas, not averaged.

    `finish_backward` is collective over the reduction groups. `acquire`, `refresh`, `settle`,
    `adopt` and `parameters` are collective over the ranks that hold parts of the same parameters.

    Args:
        records: this rank's parameters, initialised, in the order of the forward pass. Their
            storage is replaced.
        units_in_flight: number of large units in the prefetch window, and of gradient reductions
            that continue while the next unit computes.
        feedback: how rounding errors of gradients are kept; None = they are not.
        fuse_gradients: whether linear layers give gradients as two operands (`ProductSink`).

    Attributes:
        all_units: all units of this rank, in the order of the forward pass.
        kernels: the implementation of block quantisation.
        passes: the gradients, for code that tells which backward pass computes them.
        reads: the parameters, for code that tells when they are read.
    """

    def __init__(
        self,
        records: Sequence[ParameterRecord],
        groups: StateGroups,
        transport: Transport,
        optimizer: UpdateRule,
        units_in_flight: int = 2,
        *,
        feedback: Feedback | None = None,
        fuse_gradients: bool = True,
    ) -> None:
        self._groups, self._transport, self._feedback = groups, transport, feedback
        self.kernels = transport.kernels
        whole = optimizer.name == "muon"
        self.all_units = [
            Unit(*unit, groups.factors, groups.data_rank)
            for unit in group_records(records, groups.factors, keeps_whole=whole)
        ]
        trainable = [unit for unit in self.all_units if unit.is_trainable]
        self.reads = Parameters(self.all_units, groups, transport, units_in_flight)
        self.passes = Gradients(
            trainable,
            groups,
            transport,
            units_in_flight,
            release=self.reads.release,
            feedback=feedback,
            fuse=fuse_gradients,
        )
        gradient_shards = self.passes.shards()
        self._trainable = list(zip(trainable, gradient_shards, strict=True))
        # whether this rank stores parameters that other ranks update
        self._has_refresh = groups.factors.optimizer > groups.factors.params
        # fp32 parameters cannot serve as master weights if the refresh rounds them
        separate = self._has_refresh and transport.rounds_refresh
        setup = Setup(trainable, gradient_shards, optimizer, groups, transport, separate)
        self._optimizer = OPTIMIZERS[optimizer.name](setup)
        self.reads.set_masters(dict(zip(trainable, self._optimizer.masters, strict=True)))
        self._counted_in_norm = [
            unit.part(gradient, interval, unit.optimizer_interval)
            for unit, gradient in self._trainable
            for interval in unit.counted_intervals()
        ]
        # gradients of parameters of which other ranks of a replica hold copies
        self._partial: list[torch.Tensor] = []
        self._tied: dict[str, list[torch.Tensor]] = {}
        for record, _, gradient in self.gradients():
            if record.tensor_partial:
                self._partial.append(gradient)
            if record.tied:
                self._tied.setdefault(record.name, []).append(gradient)

    @property
    def factors(self) -> Factors:
        """The number of ranks over which each state is sharded."""
        return self._groups.factors

    def units(self, names: Collection[str]) -> tuple[Unit, ...]:
        """Return the trainable and frozen units with one of these names."""
        return tuple(unit for unit in self.all_units if unit.name in names)

    def begin_step(self, step: int, micro_batches: int) -> None:
        """Start a step, counted from 1, with empty gradients, in the formats of this step.

        Every parameter is expected to get `ParameterRecord.passes` gradients from each micro-batch:
        one per model chunk that reads it.
        """
        self._transport.begin_step(step)
        self.reads.begin_step()
        if self._feedback and self._feedback.is_reset_at(step):
            self.passes.reset_feedback()
        self.passes.begin_step(micro_batches)

    def acquire(self, units: Iterable[Unit], *, backward: bool = False) -> None:
        """Gather units' up-to-date parameters; see `Parameters.acquire`."""
        for unit in units:
            self.reads.acquire(unit, backward=backward)
            if backward:
                self.passes.begin_backward(unit)

    def release(self, units: Iterable[Unit]) -> None:
        """Free units' gathered parameters, unless they are expected again soon."""
        for unit in units:
            self.reads.release(unit)

    def finish_backward(self, left_out: Collection[ParameterRecord] = ()) -> None:
        """Complete all gradients: sum them over replicas, tensor ranks and tied copies; blocks.

        Those of parameters that the update will leave out become 0, and do not count in the norm.
        """
        self.passes.finish()
        self.reads.end_step()
        self._add_partial()
        self._add_tied()
        for record, _, gradient in self.gradients():
            if record in left_out:
                gradient.zero_()

    def _add_partial(self) -> None:
        """Sum gradients of norms and biases over tensor ranks; each rank has those of its tokens.

        The tensor ranks of one data rank hold the same intervals, so an all-reduce of these
        intervals is enough.
        """
        group, traffic = self._groups.tensor_group, self._transport.traffic
        sum_together(self._partial, group, traffic, "sequence_norms")

    def _add_tied(self) -> None:
        """Sum the gradients of all copies of a parameter, on this rank and on other stages.

        All copies lie in units of the same layout, so their ranks hold the same intervals. Stages
        have the parameters in different orders, but all of them add them up in the order of names.
        """
        for name, copies in sorted(self._tied.items()):
            total = copies[0] if len(copies) == 1 else torch.stack(copies).sum(dim=0)
            group = self._groups.tied_groups[name]
            if group is not None:
                all_reduce(total, group, self._transport.traffic, "tied_copies").wait()
            for gradient in copies:
                gradient.copy_(total)

    def squared_norm(self) -> torch.Tensor:
        """Return [] fp64: this rank's share of the gradient's squared norm, the sum over all ranks.

        Each of the ranks that hold the same optimizer interval adds an equal part.
        """
        if not self._counted_in_norm:
            return torch.zeros((), dtype=torch.float64, device=self._transport.pool.device)
        return squared_norm(self._counted_in_norm) / self._groups.replicas

    def update(
        self,
        learning_rate: float,
        gradient_divisor: torch.Tensor,
        skip: torch.Tensor | None = None,
        left_out: Collection[ParameterRecord] = (),
    ) -> None:
        """Update this rank's master weights and moments; `refresh` or `skip` must follow.

        See `Optimizer.update`. If `skip` is 1, the method `skip` must follow; None is 0. Only AdamW
        can leave out parameters.
        """
        if left_out:
            assert type(self._optimizer) is AdamW
            self._optimizer.leave_out(left_out)
        if skip is None:
            skip = torch.zeros((), device=self._transport.pool.device)
        self._optimizer.update(learning_rate, gradient_divisor, skip)

    def refresh(self, *, saved: bool = False) -> None:
        """Write this rank's updated parameters, and start to refresh those of all ranks.

        `acquire` waits for the refresh, unit by unit. If the states are `saved` now, parameters are
        sent in full, and rounding errors are discarded, as `adopt` does. A run that continues from
        the saved states therefore repeats this run.
        """
        formats = self._transport.formats
        # differences are taken to the parameters that were last sent, so these must stay
        differences = self._has_refresh and formats.refresh_differences and not saved
        if saved:
            self.passes.reset_feedback()
        if not differences:
            self._optimizer.write_parameters()
        self.reads.refresh(differences=differences)
        self._transport.begin_next_step()
        self.reads.gather_first()

    def skip(self) -> None:
        """End an update that was skipped because gradients are not finite; reset error feedback."""
        self.passes.reset_feedback()
        for unit, _ in self._trainable:  # some optimizers have written equal values to the masters
            self.reads.note_masters(unit)

    def gradients(self) -> Iterator[tuple[ParameterRecord, int, torch.Tensor]]:
        """Yield this rank's part of each parameter's gradient, read only.

        With the record: the first element in the flattened parameter, and [elements] fp32.
        """
        for unit, gradient in self._trainable:
            for index, interval, start in unit.held_parameters():
                part = unit.part(gradient, interval, unit.optimizer_interval)
                yield unit.records[index], start, part

    def shards(self, *, writable: bool = False) -> Iterator[StateShard]:
        """Yield this rank's part of each parameter's optimizer states.

        If they are `writable`, the caller may overwrite them, and `adopt` must follow.
        """
        optimizer = self._optimizer
        states_of = optimizer.writable_states_of if writable else optimizer.states_of
        for number, (unit, _) in enumerate(self._trainable):
            for index, interval, start in unit.held_parameters():
                states = states_of(number, interval)
                yield StateShard(unit.records[index], start, states)
        yield from self._optimizer.more_shards()

    def frozen_shards(self, *, writable: bool = False) -> Iterator[StateShard]:
        """Yield this rank's part of each frozen parameter, in its own dtype, as the state `master`.

        All ranks of a replica have each element once. If they are `writable`, a rank has all
        elements that it stores, and the caller may overwrite them.
        """
        for unit in self.all_units:
            if not unit.is_trainable:
                within = unit.params_interval if writable else unit.optimizer_interval
                for index, interval, start in unit.held_parameters(within):
                    values = unit.shard_part(interval)
                    yield StateShard(unit.records[index], start, {"master": values})

    @property
    def saved_bytes(self) -> int:
        """Bytes of the optimizer states of this rank in a checkpoint, padding included."""
        return self._optimizer.saved_bytes

    def settle(self) -> None:
        """Wait until no collective reads or writes states, so that `shards` may be overwritten."""
        self.reads.settle()
        self.reads.end_step()

    def take_parameters(self, unit: Unit, indices: Collection[int]) -> None:
        """Make this rank's part of some parameters of a trainable unit its master weights."""
        number = [other for other, _ in self._trainable].index(unit)
        for index, interval, _ in unit.held_parameters():
            if index in indices:
                self._optimizer.read_parameters(number, interval)
        self.reads.note_masters(unit)

    def adopt(self, updates: int, step: int, missed: Mapping[str, int] | None = None) -> None:
        """Continue from `shards` that the caller has overwritten: refresh all parameters from them.

        Args:
            updates: number of updates in the new states.
            step: the step that they were saved after; larger if updates were skipped.
            missed: number of updates that left a parameter out, by its name. Only AdamW counts
                the updates of each parameter.
        """
        if missed and type(self._optimizer) is AdamW:
            self._optimizer.resume(updates, missed)
        else:
            self._optimizer.resume(updates)
        self.passes.reset_feedback()
        self.reads.end_step()
        self._transport.begin_step(max(1, step))
        self.reads.refresh()
        self.reads.settle()
        self._transport.begin_next_step()

    def close(self) -> None:
        """Remove all hooks from the parameters; `shards` stays. No training may follow."""
        self.passes.close()

    def parameters(
        self, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[ParameterRecord, torch.Tensor]]:
        """Yield every parameter in full, gathered from the master weights without quantisation.

        All ranks must exhaust the iterator. The parameters that training reads are not touched.
        """
        self.reads.settle()
        for unit in self.all_units:
            buffer = self.reads.gather_exact(unit, dtype)
            for index, record in enumerate(unit.records):
                yield record, unit.view(buffer, index)

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that stay allocated between steps, by category.

        `gathered` is the largest memory of gathered parameters since the start. If states are sent
        quantised, `messages` is that of message buffers, and `feedback` that of rounding errors.
        """
        parameters = sum(unit.shard.numel() * unit.shard.element_size() for unit in self.all_units)
        categories = {
            "parameters": parameters,
            "gradients": self.passes.memory_bytes(),
            **self._optimizer.allocated_bytes(),
            "gathered": self.reads.peak_gathered_bytes,
        }
        if self._transport.encodes:
            categories["feedback"] = self.passes.feedback_bytes()
            categories["messages"] = self._transport.pool.allocated_bytes
        return categories
