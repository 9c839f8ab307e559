"""Reduce-scatters that add up in fp32, whatever travels, asynchronously."""

import torch
import torch.distributed as dist

from frontier_llm.collectives.handle import Handle
from frontier_llm.collectives.messages import exchange
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.geometry.wire import gather_bytes


class ReduceScatter:
    """A reduce-scatter under way.

    Each rank sends every other one its part, and the receiver adds them up in fp32, once: the
    volume of a ring's reduce-scatter without its rounding at every hop. gloo's own
    reduce_scatter_tensor moves as much as an all-reduce. Where fp32 travels on a GPU the native
    one is used.
    """

    def __init__(
        self,
        whole: torch.Tensor,
        group: dist.ProcessGroup,
        traffic: Traffic,
        name: str,
        out: torch.Tensor | None = None,
    ) -> None:
        """Start; returns at once.

        Collective over `group`.

        Args:
            whole: [n], n divisible by the ranks, fp32 or bf16. Must not be touched until
                `wait()`; of fp32 this rank's part may become the sum.
            group: the ranks that add up, in the order of the parts they will own.
            traffic: where the bytes are counted.
            name: under which they are counted.
            out: [n / ranks] fp32, overwritten with the sum; it may be this rank's part of `whole`.
                Absent = that part where it is fp32, else a new tensor.
        """
        size = group.size()
        ranks = tuple(dist.get_process_group_ranks(group))
        sent_bytes = gather_bytes(whole.numel() * whole.element_size(), size)
        self._parts, self._mine = whole.view(size, -1), group.rank()  # kept alive until sent
        self._out = out
        self._native = whole.device.type != "cpu" and whole.dtype == torch.float32
        if self._native:
            traffic.ring(name, ranks, sent_bytes)
            self._received = torch.empty_like(self._parts[0]) if out is None else out
            work = dist.reduce_scatter_tensor(self._received, whole, group=group, async_op=True)
            assert work is not None
            self._work: Handle = work
        else:
            traffic.pairs(name, ranks, sent_bytes)
            self._received = torch.empty_like(self._parts)
            self._work = exchange(self._parts, self._received, group)

    def wait(self) -> torch.Tensor:
        """Return [n / ranks] fp32, the sum of this rank's part over the group."""
        self._work.wait()
        if self._native:
            return self._received
        own, others = self._parts[self._mine], self._received.unbind()
        others = others[: self._mine] + others[self._mine + 1 :]
        if self._out is None:
            total = own.float()  # of fp32 the part itself
        elif others and own.dtype == torch.float32:
            total = torch.add(own, others[0], out=self._out)
            others = others[1:]
        else:
            total = self._out.copy_(own)
        for part in others:
            total.add_(part)
        return total
