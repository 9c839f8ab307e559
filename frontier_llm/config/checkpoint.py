"""When and where a run saves checkpoints, and what happens when saving fails."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section


class LocalTierConfig(Section):
    """Checkpoints on a local disk of each node: fast and frequent, lost if the node is lost."""

    path: str | None
    """A directory that exists on every node (`/mnt/bb/$USER` on Frontier); null = no local
    checkpoints."""
    every_steps: int = Field(ge=1)
    """Steps between two local checkpoints."""
    keep: int = Field(ge=1)
    """Number of the newest local checkpoints that are kept."""


class TiersConfig(Section):
    """Places for checkpoints besides the run directory."""

    local: LocalTierConfig
    """A local disk of each node."""


class CheckpointConfig(Section):
    """Checkpoints in `run.dir/checkpoints`, on a file system that all nodes share.

    Paper: DataStates-LLM (arXiv:2406.10707).
    """

    mode: Literal["off", "blocking", "lazy"]
    """`lazy`: a checkpoint is written while training continues; `blocking`: training waits until
    it is written; `off`: no checkpoint is written, not even at the end."""
    every_steps: int = Field(ge=1)
    """Steps between two checkpoints; the last step of a run is always saved."""
    keep: int = Field(ge=1)
    """Number of the newest checkpoints that are kept."""
    keep_every_steps: int | None = Field(ge=1)
    """Checkpoints whose step is a multiple of this are never deleted; null = all may be."""
    files: Literal["rank", "node"]
    """`rank`: each rank writes one file; `node`: the ranks of a node write one file together,
    which makes fewer files for a parallel file system."""
    timeout_seconds: float = Field(gt=0)
    """How long the ranks that have written wait for the slowest rank before the checkpoint
    fails."""
    pool_bytes: int | None = Field(ge=0)
    """Most host memory per rank for copies of states that are not yet on disk when the optimizer
    changes them; null = as much as all states need. With less, the update waits for the disk."""
    on_error: Literal["stop", "continue"]
    """When a checkpoint cannot be written: `stop` ends the run; `continue` prints a warning, keeps
    the last good checkpoint and trains on."""
    verify: bool
    """Compare the digests of all data that is read when a run resumes."""
    fallback: bool
    """Resume from an older checkpoint if the newest is damaged."""
    tiers: TiersConfig
    """Places for checkpoints besides the run directory."""
