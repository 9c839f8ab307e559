"""Units of model states: their flat buffers, and the process groups they are sharded over."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from frontier_llm.geometry.flat_layout import FlatLayout, divided_layouts, flat_layout
from frontier_llm.geometry.partition import Cut, Digit, Factors, Hop, Interval
from frontier_llm.protocols import ParameterRecord
from frontier_llm.sharding.guarded import guard, unguard


@dataclass(frozen=True)
class StateGroups:
    """The process groups of this rank along which model states are gathered and reduced."""

    factors: Factors
    """The numbers of ranks over which parameters, gradients and optimizer states are divided."""
    data_rank: int
    """This rank's position on the data axis."""
    groups: Mapping[Hop, dist.ProcessGroup]
    """A group for each of `factors.collective_hops`. geometry/partition.py says what a hop and a
    digit are."""
    tensor_group: dist.ProcessGroup
    """The ranks that split the same matrices. Under sequence parallelism, each has a part of the
    gradient of norms and biases; these parts are summed."""
    tied_groups: Mapping[str, dist.ProcessGroup | None]
    """By name of a tied parameter: the ranks of other stages that hold a copy of it, and this rank;
    None if only this stage has copies."""

    def along(self, *digits: Digit) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups of the hops of some digits, in the order of a reduction.

        A gather takes them in the reverse order. The ranks of the groups along a digit hold:

        - `params`: together all parameters.
        - `grads`: together the gradients of the parameters that this rank stores.
        - `optimizer`: together the optimizer states of the gradients that this rank stores.
        - `replica`: each the same optimizer states as this rank.
        """
        return tuple(group for hop, group in self.groups.items() if hop.digit in digits)

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same optimizer interval."""
        return self.factors.data // self.factors.optimizer


class Unit:
    """Parameters that are gathered and reduced together, on one flat buffer.

    The records' parameters are views into `buffer`. If parameters are sharded, the memory of
    `buffer` exists only between `materialise` and `release`, while `shard` always has memory. If
    they are not, `shard` and `buffer` are the same tensor. The memory is allocated and freed by
    resizing the buffer's storage: autograd keeps views of a weight from the forward to the backward
    pass, and these views must stay valid.

    Attributes:
        records: the records of its parameters; all are trainable or all are frozen.
        layout: where each parameter lies in the buffer of n elements.
        buffer: [n] compute dtype, the parameters.
        shard: [n / params factor] compute dtype, this rank's interval of the parameters.
        params_parts, grads_parts, states_parts, refresh_parts: where the buffer is divided into
            intervals of parameters, and of gradients; where the gradient interval, and where the
            parameter interval, is divided into optimizer intervals (`Cut.parts`).
        params_interval: interval of the buffer that this rank stores.
        grads_interval: interval whose gradients this rank reduces, inside `params_interval`.
        optimizer_interval: interval that this rank updates, inside `grads_interval`.
    """

    def __init__(
        self,
        name: str,
        records: Sequence[ParameterRecord],
        layout: FlatLayout,
        factors: Factors,
        data_rank: int,
    ) -> None:
        self.name, self.records, self.layout = name, tuple(records), layout
        n, cut = layout.size, Cut(factors, layout.size, layout.bounds)
        p, g, o = factors.params, factors.grads, factors.optimizer
        self.params_interval: Interval = cut.interval(data_rank, p)
        self.grads_interval: Interval = cut.interval(data_rank, g)
        self.optimizer_interval: Interval = cut.interval(data_rank, o)
        self.params_parts = cut.parts(data_rank, 1, p)
        self.grads_parts = cut.parts(data_rank, 1, g)
        self.states_parts = cut.parts(data_rank, g, o)
        self.refresh_parts = cut.parts(data_rank, p, o)
        self.is_trainable = records[0].parameter.requires_grad
        self.is_sharded = factors.params > 1
        self._before_read: list[Callable[[], None]] = []
        self.buffer = records[0].parameter.new_zeros(n)
        self._views = [self.view(self.buffer, index) for index in range(len(self.records))]
        for record, view in zip(self.records, self._views, strict=True):
            view.copy_(record.parameter.data)
            record.parameter.data = view
        # what a read finds that torch does not tell to `guard`: NaN, and never freed memory
        nan = self.buffer.new_full((), float("nan"))
        self._nothing = [nan.expand(view.shape) for view in self._views]
        self._storages = {t.untyped_storage()._cdata for t in (self.buffer, nan)}
        self.shard = self.buffer
        if self.is_sharded:
            self.shard = self.part(self.buffer, self.params_interval).clone()
            self.release()

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffer's memory while it exists."""
        return self.buffer.nbytes

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Return a view of the part of a tensor [n] that belongs to a parameter, in its shape."""
        start = self.layout.starts[index]
        parameter = self.records[index].parameter
        return flat[start : start + parameter.numel()].view(parameter.shape)

    @staticmethod
    def part(
        flat: torch.Tensor, interval: Interval, within: Interval | None = None
    ) -> torch.Tensor:
        """Return a view of an interval of the buffer.

        `flat` is a tensor as long as the buffer, or holds its interval `within`.
        """
        start = interval.start - (within.start if within else 0)
        return flat[start : start + interval.length]

    def shard_part(self, interval: Interval) -> torch.Tensor:
        """Return an interval inside `params_interval` as a view of the shard."""
        return self.part(self.shard, interval, self.params_interval)

    def matrix_elements(self, interval: Interval) -> int:
        """Return how many elements of an interval belong to matrices; only these are quantised.

        They come first in the buffer; norms, biases and the padding follow.
        """
        return max(0, min(self.layout.decayed - interval.start, interval.length))

    def materialise(self) -> torch.Tensor:
        """Allocate the buffer's memory and copy this rank's shard into it.

        The rest of the buffer is undefined until the other shards are gathered.
        """
        self.buffer.untyped_storage().resize_(self.buffer_bytes)
        self.part(self.buffer, self.params_interval).copy_(self.shard)
        return self.buffer

    def release(self) -> None:
        """Free the buffer's memory; parameters cannot be read until they are gathered again."""
        for record, nothing in zip(self.records, self._nothing, strict=True):
            unguard(record.parameter)
            record.parameter.data = nothing
        self.guard()
        self.buffer.untyped_storage().resize_(0)

    def guard_with(self, before_read: Callable[[ParameterRecord], None]) -> None:
        """Set what is called before a parameter is read that is guarded."""
        self._before_read = [partial(before_read, record) for record in self.records]

    def guard(self) -> None:
        """Guard the parameters: their values are not available, or not up to date."""
        for record, before_read in zip(self.records, self._before_read, strict=False):
            guard(record.parameter, before_read)

    def unguard(self) -> None:
        """Let the parameters be read."""
        for record, view in zip(self.records, self._views, strict=True):
            unguard(record.parameter)
            if self.is_sharded:
                record.parameter.data = view

    def owns(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether a parameter's memory is that of this unit."""
        with torch._C.DisableTorchFunctionSubclass():
            return parameter.untyped_storage()._cdata in self._storages

    def held_parameters(
        self, within: Interval | None = None
    ) -> Iterator[tuple[int, Interval, int]]:
        """Yield each record that overlaps with an interval; None = this rank's optimizer interval.

        These are the index of the record, the overlap as an interval of the buffer, and the index
        of its first element in the flattened parameter.
        """
        own = within or self.optimizer_interval
        for index, start in enumerate(self.layout.starts):
            first = max(start, own.start)
            stop = min(start + self.records[index].parameter.numel(), own.stop)
            if first < stop:
                yield index, Interval(first, stop - first), first - start

    def record_at(self, place: int) -> ParameterRecord:
        """Return the parameter that has an element of the optimizer interval of this rank."""
        element = place + self.optimizer_interval.start
        starts = zip(self.layout.starts, self.records, strict=True)
        before = ((s, record) for s, record in starts if s <= element and record.parameter.numel())
        return max(before, key=lambda pair: pair[0])[1]

    def counted_intervals(self) -> list[Interval]:
        """Return the parts of the optimizer interval that this rank counts in the gradient norm.

        If several ranks of a replica hold the same parameter, `record.counted` is set on one of
        them. Adjacent parts are merged.
        """
        merged: list[Interval] = []
        held = self.held_parameters()
        for interval in sorted(part for index, part, _ in held if self.records[index].counted):
            if merged and merged[-1].stop == interval.start:
                previous = merged.pop()
                interval = Interval(previous.start, previous.length + interval.length)
            merged.append(interval)
        return merged


class UnitRecords(NamedTuple):
    """The parameters of one unit, and where they lie in its buffer."""

    name: str
    records: Sequence[ParameterRecord]
    layout: FlatLayout


def group_records(
    records: Sequence[ParameterRecord], factors: Factors, *, keeps_whole: bool
) -> list[UnitRecords]:
    """Group records into units, in the order of the forward pass.

    If a unit has both trainable and frozen parameters, it becomes two units of the same name.
    `keeps_whole` tells that the optimizer updates the matrices of layers as a whole, so that no
    interval may end inside of one.
    """
    members: dict[tuple[str, bool], list[ParameterRecord]] = {}
    for record in records:
        members.setdefault((record.unit, record.parameter.requires_grad), []).append(record)
    layouts = [
        flat_layout(
            [record.parameter.numel() for record in group],
            [record.is_matrix for record in group],
            factors.multiple(),
            [
                record.name if keeps_whole and is_trained and record.is_matrix_of_layer else None
                for record in group
            ],
        )
        for (_, is_trained), group in members.items()
    ]
    divided = divided_layouts(layouts, factors.optimizer)
    return [
        UnitRecords(name, group, layout)
        for ((name, _), group), layout in zip(members.items(), divided, strict=True)
    ]
