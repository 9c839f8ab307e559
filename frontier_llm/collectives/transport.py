"""How model states travel: gathers and reductions along consecutive digits, in any format.

A flow is a chain's steps (chain.py). Whatever the format, the call is the same:

    gather   parts -> whole    as they are: in place, hop by hop
                               encoded: this rank's part becomes a slot, slots are gathered hop by
                               hop, and all parts are read from slots, this rank's own as well, so
                               that all ranks hold the same bits
    reduce   whole -> a part   each hop sends every other rank its part, and the receiver adds up
                               in fp32; what a rank keeps for itself is never rounded

A gather over two digits encodes once: the second hop passes on what the first one brought.

Paper: ZeRO++ (arXiv:2306.10209), qwZ and qgZ. Differs: the owner uses what it sent; slices need no
re-ordering, since the digits of geometry/partition.py lie in the order of the hops.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from frontier_llm.collectives.blockwise import BlockKernels
from frontier_llm.collectives.chain import Steps
from frontier_llm.collectives.gather import all_gather
from frontier_llm.collectives.messages import exchange
from frontier_llm.collectives.pool import BufferPool
from frontier_llm.collectives.reduce_scatter import ReduceScatter
from frontier_llm.collectives.slot_sum import SlotSum
from frontier_llm.collectives.slots import SlotCodec
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.geometry.formats import Format, StateFormats
from frontier_llm.geometry.wire import gather_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_STEP_STRIDE, _RANK_STRIDE, _CALL_STRIDE = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
"""Odd numbers, so that seeds of neighbouring steps, ranks and calls lie far apart."""


class Transport:
    """Sends what one rank sends of its model states.

    Attributes:
        formats: of the step that what is sent belongs to.
        traffic: where bytes are counted.
        kernels: of block quantisation.
        pool: of the buffers that messages lie in.
    """

    def __init__(
        self,
        formats_at: Callable[[int], StateFormats],
        traffic: Traffic,
        kernels: BlockKernels,
        compute_dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        """Set up.

        Args:
            formats_at: the formats of each step, counted from 1.
            traffic: where bytes are counted.
            kernels: of block quantisation.
            compute_dtype: of the parameters.
            device: of the buffers.
            seed: of stochastic rounding, differs by rank.
        """
        self.traffic, self.kernels = traffic, kernels
        self.pool = BufferPool(device)
        self.compute_dtype = compute_dtype
        self._formats_at, self._seed = formats_at, seed
        self._step, self._calls = 1, 0
        self.formats = formats_at(1)

    @property
    def encodes(self) -> bool:
        """Whether anything is sent in slots in some step."""
        return self._formats_at(1).encode(self.compute_dtype.itemsize)

    @property
    def rounds_refresh(self) -> bool:
        """Whether the refresh of some step sends less than the parameters hold."""
        return not self._formats_at(1).refresh.is_lossless(self.compute_dtype.itemsize)

    def begin_step(self, step: int) -> None:
        """Send what follows in the formats of a step."""
        if step != self._step:
            self._step, self._calls = step, 0
            self.formats = self._formats_at(step)

    def begin_next_step(self) -> None:
        """Send what follows in the formats of the next step."""
        self.begin_step(self._step + 1)

    def scatter_format(self, group: dist.ProcessGroup) -> Format:
        """Return the format of gradients that are scattered over a group."""
        return self.formats.grads_over(self.traffic.nodes(group))

    def keeps_errors(self, group: dist.ProcessGroup) -> bool:
        """Whether what rounding loses over a group is worth keeping: it spans nodes, in integers.

        Of the first step's formats, which have at least as many integers as any later one's.
        """
        nodes = self.traffic.nodes(group)
        return len(set(nodes)) > 1 and self._formats_at(1).grads_over(nodes).is_quantised

    def gather(
        self,
        whole: torch.Tensor,
        groups: Sequence[dist.ProcessGroup | None],
        code: Format,
        border: int,
        name: str,
    ) -> Steps:
        """Fill a buffer from the parts that ranks hold in it.

        Collective over the groups, one after the other.

        Args:
            whole: [n], n divisible by the product of the groups' sizes; this rank's part, at its
                place (the first group's digit is the fastest), is read; all may be overwritten.
            groups: the hops; None = this rank alone.
            code: the format.
            border: elements before it are quantised.
            name: under which the bytes are counted.
        """
        hops = [group for group in groups if group is not None]
        count, mine = 1, 0
        for group in hops:
            count, mine = count * group.size(), mine + count * group.rank()
        if not hops or whole.numel() == 0:
            return
        itemsize = whole.element_size()
        if code.is_lossless(itemsize):
            yield from self._spread(whole, hops, mine, count, name)
            return
        elements = whole.numel() // count
        parts, codec = whole.view(count, elements), self._codec(code)
        slots = self._slots(code, elements, count, border)
        quantised = [code.quantised_of(border, i * elements, elements) for i in range(count)]
        codec.write(parts[mine], quantised[mine], slots[mine], seed=self._next_seed())
        plain_bytes = elements * itemsize
        yield from self._spread(slots.view(-1), hops, mine, count, name, plain_bytes)
        for part, slot, leading in zip(parts, slots, quantised, strict=True):
            codec.read(slot, leading, part)
        self.pool.give(slots)

    def reduce(
        self,
        whole: torch.Tensor,
        groups: Sequence[dist.ProcessGroup | None],
        border: int,
        name: str,
        residuals: Sequence[torch.Tensor | None],
        out: torch.Tensor,
        *,
        add: bool = False,
    ) -> Steps:
        """Add a buffer up over ranks, of which each keeps a part.

        Collective over the groups, one after the other. A `whole` that was borrowed from the pool
        is given back as soon as nothing needs it, and so is every sum between two hops.

        Args:
            whole: [n], n divisible by the product of the groups' sizes; not to be touched until
                the steps are done. Sums may come to lie in it.
            groups: the hops; None = this rank alone.
            border: elements before it are quantised.
            name: under which the bytes are counted.
            residuals: for each hop [its elements] bf16, what rounding lost, or None.
            out: [n / ranks] fp32, takes this rank's part of the sum; it may be that part of
                `whole`. Not to be touched until the steps are done.
            add: whether the sum is added to what `out` holds.
        """
        hops = [(g, r) for g, r in zip(groups, residuals, strict=True) if g is not None]
        for group, residual in hops if whole.numel() else ():
            code = self.scatter_format(group)
            elements = whole.numel() // group.size()
            if code.is_quantised:
                handle = self._scatter(whole, group, code, border, name, residual)
                self.pool.give(whole)
                whole = yield handle
            else:
                sent = whole.to(DTYPES[code.name])
                if sent is not whole:
                    self.pool.give(whole)
                last = out if group is hops[-1][0] and not add else None
                whole = yield ReduceScatter(sent, group, self.traffic, name, last)
                if whole.untyped_storage().data_ptr() != sent.untyped_storage().data_ptr():
                    self.pool.give(sent)  # the sum does not lie in it
            border = max(0, min(border - group.rank() * elements, elements))
        if add:
            out.add_(whole)
        elif whole.data_ptr() != out.data_ptr():
            out.copy_(whole)
        self.pool.give(whole)

    def _scatter(
        self,
        whole: torch.Tensor,
        group: dist.ProcessGroup,
        code: Format,
        border: int,
        name: str,
        residual: torch.Tensor | None,
    ) -> SlotSum:
        """Send every other rank its part in a slot; `whole` may be overwritten at once."""
        count, mine = group.size(), group.rank()
        elements = whole.numel() // count
        parts, codec = whole.view(count, elements), self._codec(code)
        kept = [None] * count if residual is None else residual.view(count, elements)
        quantised = [code.quantised_of(border, i * elements, elements) for i in range(count)]
        sent, received = (self._slots(code, elements, count, border) for _ in range(2))
        for i in range(count):
            if i != mine:
                codec.write(parts[i], quantised[i], sent[i], kept[i], self._next_seed())
        total = self.pool.take(elements, torch.float32)
        total.copy_(parts[mine])
        plain_bytes = elements * self.compute_dtype.itemsize
        ranks = tuple(dist.get_process_group_ranks(group))
        others = count - 1
        self.traffic.pairs(name, ranks, others * sent.shape[1], others * plain_bytes)
        work = exchange(sent, received, group)
        return SlotSum(work, codec, quantised[mine], mine, sent, received, total, self.pool)

    def _spread(
        self,
        buffer: torch.Tensor,
        hops: Sequence[dist.ProcessGroup],
        mine: int,
        count: int,
        name: str,
        plain_bytes: int | None = None,
    ) -> Steps:
        """Gather hop by hop in place: each one fills the run of parts around this rank's."""
        part, run = buffer.numel() // count, 1
        for group in hops:
            before, run = run, run * group.size()
            first = mine // run * run
            span = buffer[first * part : (first + run) * part]
            stands_for = None
            if plain_bytes is not None:
                stands_for = gather_bytes(before * group.size() * plain_bytes, group.size())
            yield all_gather(span, group, self.traffic, name, stands_for)

    def _slots(self, code: Format, elements: int, count: int, border: int) -> torch.Tensor:
        """Borrow [count, bytes] uint8: a slot for each part."""
        size = code.slot_bytes(elements, count, border)
        return self.pool.take(count * size).view(count, size)

    def _codec(self, code: Format) -> SlotCodec:
        return SlotCodec(code, self.kernels, self.compute_dtype)

    def _next_seed(self) -> int:
        self._calls += 1
        mixed = self._step * _STEP_STRIDE + self._seed * _RANK_STRIDE + self._calls * _CALL_STRIDE
        return mixed & 0xFFFFFFFF
