"""Settings of a `CheckpointManager` that most runs leave at their defaults."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from frontier_llm.checkpoint.chunk_pool import SharedPool
from frontier_llm.checkpoint.manifest import Moments
from frontier_llm.geometry.host_pool import CHUNK_BYTES

Outcome = Literal["committed", "skipped", "failed"]
"""How a checkpoint ended. `skipped`: given up in favour of a newer one, without an error."""


@dataclass(frozen=True)
class Options:
    """Settings of retention, memory and file layout."""

    keep_every_steps: int | None = None
    """Checkpoints whose step is a multiple of this number are kept forever."""
    pool_bytes: int | None = None
    """Limit in bytes of the host memory into which chunks are copied; None: enough for all
    chunks. With less memory, `fence` waits if the disk is slow."""
    chunk_bytes: int = CHUNK_BYTES
    """Size of a chunk in bytes, a multiple of 4096 (a page). Each write is one chunk."""
    folder_ranks: range | None = None
    """Ranks of this node, if each node has its own folder; None if all ranks share one folder. Two
    nodes may store the same elements, since each stores all that its ranks pass to `begin`."""
    file_ranks: range | None = None
    """Ranks of this node, if they write one file together; None if each rank writes its own."""
    ranks_on_host: int = 1
    """Number of ranks on this host. Each of them allocates the same amount of host memory."""
    pool: SharedPool | None = None
    """Host memory that this manager shares with others; None: it allocates its own."""
    moments: Moments | None = None
    """Format in which Adam's moments are stored; None: fp32."""
    in_flight: int = 1
    """Number of checkpoints that may be unwritten at the same time; `begin` waits beyond that."""
    on_end: Callable[[int, Outcome], None] = lambda _step, _outcome: None
    """Called by the writer with the step of a checkpoint when this rank knows how it ended."""
    spared: Callable[[], Collection[int]] = tuple
    """Returns steps that are not deleted now, because another thread reads or writes them."""


DEFAULTS = Options()
