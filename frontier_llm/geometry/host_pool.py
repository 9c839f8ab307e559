"""Count the buffers of host memory that the checkpoints of one rank share.

The planner predicts the pool with the same function with which a run allocates it.
"""

from dataclasses import dataclass

from frontier_llm.config.checkpoint import CheckpointConfig
from frontier_llm.config.partner_copies import KEPT
from frontier_llm.config.run import RunConfig
from frontier_llm.units import MIB

CHUNK_BYTES = 16 * MIB
"""Size of a buffer: the part of a file that is written, digested and verified at once."""
STATE_BYTES = 12
"""Bytes per element in a checkpoint of AdamW: an fp32 master weight and two fp32 moments."""


@dataclass(frozen=True)
class HostPool:
    """Numbers of buffers of one rank."""

    writers: int
    """Buffers of the writer threads: one per level that is written directly from the states, and
    one for node-local checkpoints with reduced moments."""
    movers: int
    """Buffers of the threads that copy checkpoints from the node's disk: two for the run directory,
    one for the copy of another node."""
    captured: int
    """Buffers for states that are not written yet when the optimizer changes them."""

    @property
    def buffers(self) -> int:
        """Number of all buffers."""
        return self.writers + self.movers + self.captured

    @property
    def size(self) -> int:
        """Size of all buffers in bytes."""
        return self.buffers * CHUNK_BYTES


def copied_bytes(config: RunConfig, saved_bytes: int) -> int:
    """Return the most bytes of the files of `recovery.partner_copies` in the memory of a node.

    They are the kept steps and the one being written, of this rank and of one of another node.
    """
    return 2 * (KEPT + 1) * saved_bytes if config.recovery.partner_copies else 0


def host_pool(
    config: CheckpointConfig, saved_bytes: int, replicas: int, *, saves_locally: bool = True
) -> HostPool:
    """Return the buffers that a rank allocates for the checkpoints of all levels.

    Replicas divide the writing to the run directory between them. A rank does not write its states
    to the disk of its node (`saves_locally`) if a lower rank of the node holds the same states.
    """
    if config.mode == "off" or not saved_bytes:
        return HostPool(0, 0, 0)
    has_node_level = config.tiers.local.path is not None
    writers = 1 + has_node_level + config.has_reduced_moments
    movers = 2 * has_node_level + config.has_partner
    saved = saved_bytes if has_node_level and saves_locally else -(-saved_bytes // replicas)
    captured = -(-saved // CHUNK_BYTES) if config.mode == "lazy" else 0
    if config.pool_bytes is not None:
        captured = max(0, min(captured, config.pool_bytes // CHUNK_BYTES - writers - movers))
    return HostPool(writers, movers, captured)
