"""Gathers, reductions and sums of model states, over process groups, in any format.

`Transport.gather` fills a buffer from the parts that the ranks hold. In a lossless format the parts
are gathered in place, group by group. In other formats each rank encodes its part into a slot (a
message of fixed size, geometry/formats.py), the slots are gathered group by group, and every rank
decodes all of them. It also decodes its own slot, so that all ranks hold the same bits. A gather
over two groups encodes once: the second group gathers the slots that the first has gathered.

`Transport.reduce` sums a buffer over the ranks and leaves each rank one part of the sum. In each
group, a rank adds its own summand and those that it receives in fp32. The format of the group
decides which summands are rounded before:

    fp32        none
    bf16        all, also the rank's own
    int8, int4  those that are received, but not the rank's own

`Transport.all_reduce` gives every rank the sum of a buffer: a reduction and a gather of the sums,
which together send as few bytes as a ring. Summands are rounded as in a reduction, sums once.

All three are generators of collectives, which a `Chain` (handles.py) runs one after the other.

Source: the quantised gathers (qwZ) and reductions (qgZ) of ZeRO++ (arXiv:2306.10209). Differences:
the owner of a part also uses the decoded values, and no re-ordering is needed, since parts lie in
the order of the groups (geometry/partition.py).
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from frontier_llm.collectives.blockwise import PART_SEED_STRIDE, BlockKernels
from frontier_llm.collectives.handles import Handle, Steps
from frontier_llm.collectives.primitives import ReduceScatter, all_gather, exchange
from frontier_llm.collectives.residual import Residual
from frontier_llm.collectives.slots import BufferPool, Slots
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.geometry.formats import Format, LevelFormats, StateFormats
from frontier_llm.geometry.wire import gather_bytes, pairs_sent

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_STEP_STRIDE, _RANK_STRIDE = 0x9E3779B1, 0x85EBCA77
"""Odd numbers, so that the rounding seeds of neighbouring steps and ranks lie far apart."""


class Transport:
    """Sends and receives one rank's model states, at first in the formats of step 1.

    In all methods, only elements of `buffer` before the index `border` are quantised, and `name` is
    the collective under which the bytes are counted. Groups are taken in the given order; without a
    group, this rank is alone.

    Args:
        formats_at: returns the formats of a step, counted from 1.
        compute_dtype: dtype of the parameters.
        device: where message buffers are allocated.
        seed: seed of stochastic rounding; must differ between ranks.
        pairwise: whether gathers and scatters on a CPU are point-to-point messages. On a GPU they
            never are.
    """

    def __init__(
        self,
        formats_at: Callable[[int], StateFormats],
        traffic: Traffic,
        kernels: BlockKernels,
        compute_dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
        *,
        pairwise: bool = True,
    ) -> None:
        self.traffic, self.kernels = traffic, kernels
        self.pool = BufferPool(device)
        self.compute_dtype = compute_dtype
        self.pairwise = pairwise and device.type == "cpu"
        self._formats_at, self._step = formats_at, 1
        self._seed, self._seeds_taken = seed, 0
        self.formats = formats_at(1)

    @property
    def encodes(self) -> bool:
        """Whether any step sends slots, that is, encodes messages."""
        return self._formats_at(1).any_encoded(self.compute_dtype.itemsize)

    @property
    def rounds_refresh(self) -> bool:
        """Whether any step sends refreshed parameters in fewer bits than they have."""
        return not self._formats_at(1).refresh.is_lossless(self.compute_dtype.itemsize)

    def begin_step(self, step: int) -> None:
        """Use the formats of a step from now on."""
        if step != self._step:
            self._step = step
            self._seeds_taken = 0
            self.formats = self._formats_at(step)

    def begin_next_step(self) -> None:
        """Use the formats of the next step from now on."""
        self.begin_step(self._step + 1)

    def scatter_format(self, group: dist.ProcessGroup) -> Format:
        """Return the format of gradients that are scattered over a group."""
        return self.formats.grads.at(self.traffic.level(group))

    def needs_feedback(self, group: dist.ProcessGroup, *, sums: bool = False) -> bool:
        """Whether gradients are quantised and cross nodes: scattered ones, or `sums` over replicas.

        The formats of step 1 decide for all steps, since later steps quantise the same or less.
        """
        formats = self._formats_at(1)
        of_level = formats.sums if sums else formats.grads
        return self.traffic.level(group) == "network" and of_level.network.is_quantised

    def gather(
        self,
        buffer: torch.Tensor,
        groups: Sequence[dist.ProcessGroup],
        fmt: Format,
        border: int,
        name: str,
        residual: Residual | None = None,
        source: torch.Tensor | None = None,
        bounds: Sequence[int] = (),
    ) -> Steps:
        """Fill a buffer from the parts that the ranks hold.

        Collective over the groups, one after the other.

        Args:
            buffer: [n], with as many parts as the product of the groups' sizes (`part_of` says in
                which order). This rank's part is read, and every part may be overwritten.
            residual: [1, elements of this rank's part]: the rounding errors of the last gather,
                which are added before encoding (see BlockKernels.quantise), or None.
            source: [elements of this rank's part] fp32, the new values of this rank's part; None =
                they are in `buffer`. If it is given, this rank sends the difference between
                `source` and its part of `buffer`, and all ranks add the decoded difference to that
                part. They must hold equal values there before. Elements that are not quantised are
                sent and replaced in full. The format must not be lossless.
            bounds: first element of each part, and at last n; empty = parts of equal length. Parts
                of different lengths are sent in a lossless format only.
        """
        if not groups or buffer.numel() == 0:
            return
        itemsize = buffer.element_size()
        if fmt.is_lossless(itemsize):
            yield from self._gather_hops(buffer, groups, name, bounds=bounds)
            return
        assert not bounds, f"{name}: parts of different lengths are not encoded"
        own, count = part_of(groups)
        elements = buffer.numel() // count
        parts = buffer.view(count, elements)
        slots, seed = self._take_slots(fmt, elements, count, border), self._take_seed(1)
        own_part, own_slot = parts[own : own + 1], slots.only(own)
        values, base = (own_part, None) if source is None else (source.view(1, -1), own_part)
        self.kernels.quantise(values, own_slot, residual, seed, base=base)
        sent = slots.data.view(-1)
        part_bytes = elements * itemsize
        yield from self._gather_hops(sent, groups, name, part_bytes)
        self.kernels.dequantise(slots, parts, add=source is not None)
        self.pool.give_back(sent)

    def reduce(
        self,
        buffer: torch.Tensor,
        hops: Sequence[tuple[dist.ProcessGroup, Residual | None]],
        border: int,
        name: str,
        out: torch.Tensor,
        *,
        add: bool = False,
        formats: LevelFormats | None = None,
        bounds: Sequence[int] = (),
    ) -> Steps:
        """Reduce-scatter a buffer over one group after the other.

        Collective over the groups, one after the other. If `buffer` was borrowed from the pool, it
        is given back as soon as it has been sent or encoded.

        Args:
            buffer: [n], with as many parts as the product of the groups' sizes. It must not be
                touched until the steps are done, and may be overwritten with sums.
            hops: the groups, and with each [ranks of the group, elements per rank]: the rounding
                errors of the last reduction over this group (see BlockKernels.quantise), or None.
            out: [elements of this rank's part] fp32, receives this rank's part of the sum. It may
                be a view of this part of `buffer`. It must not be touched until the steps are done.
            add: whether the sum is added to `out` instead of replacing it.
            formats: by the farthest level of links that a group crosses; None = those of
                gradients.
            bounds: as in `gather`. Parts of different lengths are not quantised.
        """
        for group, residual in hops if buffer.numel() else ():
            sent_format = (formats or self.formats.grads).at(self.traffic.level(group))
            elements = buffer.numel() // group.size()
            if sent_format.is_quantised:
                assert not bounds, f"{name}: parts of different lengths are not quantised"
                scatter = self._scatter(buffer, group, sent_format, border, name, residual)
                buffer = yield from scatter
            else:
                sent = buffer.to(DTYPES[sent_format.name])
                if sent is not buffer:
                    self.pool.give_back(buffer)
                last_out = out if group is hops[-1][0] and not add else None
                of_ranks, bounds = narrow(bounds, group)
                buffer = yield ReduceScatter(
                    sent, group, self.traffic, name, last_out, of_ranks, pairwise=self.pairwise
                )
                if buffer.untyped_storage().data_ptr() != sent.untyped_storage().data_ptr():
                    self.pool.give_back(sent)  # the sum does not lie in it
            border = max(0, min(border - group.rank() * elements, elements))
        if add:
            out.add_(buffer)
        elif buffer.data_ptr() != out.data_ptr():
            out.copy_(buffer)
        self.pool.give_back(buffer)

    def all_reduce(
        self,
        buffer: torch.Tensor,
        groups: Sequence[dist.ProcessGroup],
        border: int,
        name: str,
        residuals: Sequence[Residual | None],
    ) -> Steps:
        """Replace a buffer by its sum over several groups, in the formats of sums.

        Collective over the groups: it reduces over one after the other, then gathers in the reverse
        order. Afterwards all ranks hold the same bits.

        Args:
            buffer: [n] fp32, n divisible by the product of the groups' sizes. It must not be
                touched until the steps are done.
            residuals: per group, as in `reduce`, which does not use this rank's row. In that row
                of the last group, the gather keeps the rounding errors of this rank's sums.
        """
        own, count = part_of(groups[::-1])
        formats, own_sum = self.formats.sums, buffer.view(count, -1)[own]
        hops = list(zip(groups, residuals, strict=True))
        yield from self.reduce(buffer, hops, border, name, own_sum, formats=formats)
        last = residuals[-1]
        of_sums = None if last is None else last.only(groups[-1].rank())
        fmt = formats.at(self.traffic.level(groups[-1]))
        yield from self.gather(buffer, groups[::-1], fmt, border, name, of_sums)

    def _gather_hops(
        self,
        buffer: torch.Tensor,
        groups: Sequence[dist.ProcessGroup],
        name: str,
        unquantised_part_bytes: int | None = None,
        bounds: Sequence[int] = (),
    ) -> Steps:
        """Gather in place, over one group after the other.

        Before a hop over a group of k ranks this rank holds a run of neighbouring parts that
        contains its own; after the hop it holds a run that is k times as long. If parts are
        encoded, `unquantised_part_bytes` is the size of one before.
        """
        own, count = part_of(groups)
        run, parts = 1, bounds or range(0, buffer.numel() + 1, buffer.numel() // count)
        for group in groups:
            step, run = run, run * group.size()
            first = own // run * run
            span = buffer[parts[first] : parts[first + run]]
            unquantised = None
            if unquantised_part_bytes is not None:
                unquantised = gather_bytes(run * unquantised_part_bytes, group.size())
            of_span = [bound - parts[first] for bound in bounds[first : first + run + 1 : step]]
            yield all_gather(
                span, group, self.traffic, name, unquantised, of_span, pairwise=self.pairwise
            )

    def _scatter(
        self,
        buffer: torch.Tensor,
        group: dist.ProcessGroup,
        fmt: Format,
        border: int,
        name: str,
        residual: Residual | None,
    ) -> Generator[Handle, None, torch.Tensor]:
        """Send every other rank its part in a slot; give `buffer` back once it is encoded.

        Return [m] fp32, borrowed from the pool: this rank's summand, which is not rounded, and the
        decoded summands of the others, added in the order of the ranks.
        """
        count, own = group.size(), group.rank()
        elements = buffer.numel() // count
        parts = buffer.view(count, elements)
        sent, received = (self._take_slots(fmt, elements, count, border) for _ in range(2))
        self.kernels.quantise(parts, sent, residual, self._take_seed(count - 1), skip=own)
        total = self.pool.take(elements, torch.float32)
        total.copy_(parts[own])
        slot_bytes, unquantised = sent.data.shape[1], elements * self.compute_dtype.itemsize
        ranks, others = tuple(dist.get_process_group_ranks(group)), count - 1
        self.traffic.count(pairs_sent, name, ranks, others * slot_bytes, others * unquantised)
        work = exchange(sent.data, received.data, group, pairwise=self.pairwise)
        self.pool.give_back(buffer)
        yield work
        # each received slot contains this rank's part, so the border is counted from its start
        of_own_part = replace(received, border=border - own * elements)
        self.kernels.add_up(of_own_part, total, skip=own)
        self.pool.give_back(sent.data)
        self.pool.give_back(received.data)
        return total

    def _take_slots(self, fmt: Format, elements: int, count: int, border: int) -> Slots:
        size = fmt.slot_bytes(elements, count, border)
        data = self.pool.take(count * size).view(count, size)
        is_fp16 = self.compute_dtype == torch.float16 and fmt.is_quantised
        unquantised_dtype = torch.float16 if is_fp16 else torch.bfloat16
        return Slots(data, fmt, elements, border, unquantised_dtype)

    def _take_seed(self, parts: int) -> int:
        """Return the rounding seed of the next encoded part; the others lie PART_SEED_STRIDE apart.

        Each encoded part of each step and rank has another seed.
        """
        part = self._seeds_taken + 1
        self._seeds_taken += parts
        mixed = self._step * _STEP_STRIDE + self._seed * _RANK_STRIDE + part * PART_SEED_STRIDE
        return mixed & 0xFFFFFFFF


def part_of(groups: Sequence[dist.ProcessGroup]) -> tuple[int, int]:
    """Return which part this rank holds before a gather over some groups, and how many there are.

    The parts of the first group's ranks lie side by side, in the order of the group; together they
    are one part of the second group, and so on.
    """
    own, count = 0, 1
    for group in groups:
        own, count = own + count * group.rank(), count * group.size()
    return own, count


def narrow(bounds: Sequence[int], group: dist.ProcessGroup) -> tuple[Sequence[int], Sequence[int]]:
    """Return the bounds of the ranks of a group, and the bounds inside the part of this rank.

    The ranks of the group share the parts equally, in their order.
    """
    if not bounds:
        return (), ()
    step = (len(bounds) - 1) // group.size()
    own = bounds[group.rank() * step : (group.rank() + 1) * step + 1]
    return bounds[::step], [bound - own[0] for bound in own]
