"""One unit: its flat buffer, and which intervals of it this rank holds."""

from collections.abc import Iterator, Sequence

import torch

from frontier_llm.geometry.flat_layout import FlatLayout, flat_layout
from frontier_llm.geometry.partition import Factors, Interval
from frontier_llm.protocols import ParameterRecord


class Unit:
    """The parameters that are gathered and reduced together, on one flat buffer.

    The records' parameters are views into `whole`. Where parameters are cut (factor over 1) its
    memory exists only between `materialise` and `release`, and `shard` is what stays; else the
    two are one tensor. The memory comes and goes by resizing one storage: autograd keeps views of
    a weight between forward and backward, and they must see the weight when it is back.

    Attributes:
        name: of the unit.
        records: its parameters; all trainable or all frozen.
        layout: where each lies in the buffer of n elements.
        whole: [n] compute dtype.
        shard: [n / p] compute dtype, this rank's interval of the parameters.
        params: that interval; `grads` and `optimizer` lie inside it, one inside the other.
    """

    def __init__(
        self, name: str, records: Sequence[ParameterRecord], factors: Factors, data_rank: int
    ) -> None:
        self.name = name
        self.records = tuple(records)
        self.layout: FlatLayout = flat_layout(
            [r.parameter.numel() for r in records],
            [r.decayed for r in records],
            factors.multiple(),
        )
        n = self.layout.size
        self.params: Interval = factors.params_interval(n, data_rank)
        self.grads: Interval = factors.grads_interval(n, data_rank)
        self.optimizer: Interval = factors.optimizer_interval(n, data_rank)
        self.whole = records[0].parameter.new_zeros(n)
        self.is_trainable = records[0].parameter.requires_grad
        self.is_cut = factors.params > 1
        for index, record in enumerate(self.records):
            home = self.view(self.whole, index)
            home.copy_(record.parameter.data)
            record.parameter.data = home
        self.shard = self.whole
        if self.is_cut:
            self.shard = self.part(self.whole, self.params).clone()
            self.release()

    @property
    def whole_bytes(self) -> int:
        """Memory of the whole buffer while it is there."""
        return self.whole.numel() * self.whole.element_size()

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Return record `index`'s part of a buffer of n elements, in the parameter's shape."""
        start = self.layout.starts[index]
        parameter = self.records[index].parameter
        return flat[start : start + parameter.numel()].view(parameter.shape)

    @staticmethod
    def part(flat: torch.Tensor, interval: Interval, of: Interval | None = None) -> torch.Tensor:
        """Return an interval of a buffer, or of a tensor that is itself the interval `of`."""
        start = interval.start - (of.start if of else 0)
        return flat[start : start + interval.length]

    def quantised_border(self, interval: Interval | None = None) -> int:
        """Return how many leading elements of an interval (of the buffer) may be quantised.

        Norms and biases may not; they and the padding end the buffer.
        """
        if interval is None:
            return self.layout.decayed
        return max(0, min(self.layout.decayed - interval.start, interval.length))

    def shard_part(self, interval: Interval) -> torch.Tensor:
        """Return an interval inside `params` as a view of the shard."""
        return self.part(self.shard, interval, self.params)

    def materialise(self) -> torch.Tensor:
        """Bring the whole buffer's memory back, with this rank's shard in its place.

        Returns:
            [n] of which all but `params` is undefined until it is gathered.
        """
        whole = self.whole
        whole.untyped_storage().resize_(self.whole_bytes)
        self.part(whole, self.params).copy_(self.shard)
        return whole

    def release(self) -> None:
        """Free the whole buffer; nobody may read the parameters until they are gathered again."""
        self.whole.untyped_storage().resize_(0)

    def held_parameters(self) -> Iterator[tuple[int, Interval, int]]:
        """Yield each record that reaches into the optimizer interval of this rank.

        Yields:
            (index of the record, the common interval in the buffer, its first element's place in
            the flattened parameter).
        """
        mine = self.optimizer
        for index, start in enumerate(self.layout.starts):
            first = max(start, mine.start)
            stop = min(start + self.records[index].parameter.numel(), mine.stop)
            if first < stop:
                yield index, Interval(first, stop - first), first - start


def make_units(records: Sequence[ParameterRecord], factors: Factors, data_rank: int) -> list[Unit]:
    """Group records by unit, in the order of the forward pass; frozen ones apart."""
    members: dict[str, list[ParameterRecord]] = {}
    for record in records:
        frozen = "" if record.parameter.requires_grad else " (frozen)"
        members.setdefault(record.unit + frozen, []).append(record)
    return [Unit(name, group, factors, data_rank) for name, group in members.items()]
