"""What arrives of a quantised reduce-scatter, and its sum."""

from dataclasses import dataclass

import torch

from frontier_llm.collectives.handle import Handle
from frontier_llm.collectives.pool import BufferPool
from frontier_llm.collectives.slots import SlotCodec


@dataclass
class SlotSum:
    """An exchange of slots under way; a handle (handle.py)."""

    work: Handle
    codec: SlotCodec
    quantised: int
    """Leading elements of each slot that are integers."""
    mine: int
    """This rank's place in the group: its own slot is not read."""
    sent: torch.Tensor
    """[ranks, bytes] uint8, the pool's."""
    received: torch.Tensor
    """[ranks, bytes] uint8, the pool's."""
    total: torch.Tensor
    """[m] fp32, the pool's: what this rank adds itself, exactly."""
    pool: BufferPool

    def wait(self) -> torch.Tensor:
        """Return [m] fp32, the sum over the group, in the order of its ranks; the pool's."""
        self.work.wait()
        self.codec.add_up(self.received, self.quantised, self.total, self.mine)
        self.pool.give(self.sent)
        self.pool.give(self.received)
        return self.total
