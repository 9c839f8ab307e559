"""When a run saves its states, where, and what happens when that fails."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section


class LocalTierConfig(Section):
    """Checkpoints on a disk of the node: fast and frequent, lost with the node."""

    path: str | None
    """A folder on every node (`/mnt/bb/$USER` on Frontier); null = no such tier."""
    every_steps: int = Field(ge=1)
    """Steps between two of them."""
    keep: int = Field(ge=1)
    """How many of the newest stay."""


class TiersConfig(Section):
    """Places besides the run directory."""

    local: LocalTierConfig
    """A disk of the node."""


class CheckpointConfig(Section):
    """Checkpoints in `run.dir/checkpoints`, on a file system that all nodes share.

    Paper: DataStates-LLM (arXiv:2406.10707).
    """

    mode: Literal["off", "blocking", "lazy"]
    """`lazy`: written while training goes on; `blocking`: while it waits; `off`: never, not even
    at the end."""
    every_steps: int = Field(ge=1)
    """Steps between two checkpoints; the last step of a run is always saved."""
    keep: int = Field(ge=1)
    """How many of the newest stay."""
    keep_every_steps: int | None = Field(ge=1)
    """Checkpoints whose step is a multiple of this stay for good; null = none."""
    files: Literal["rank", "node"]
    """Whether each rank writes a file of its own, or the ranks of a node write one together: fewer
    files, which a parallel file system may prefer."""
    timeout_seconds: float = Field(gt=0)
    """How much later than the others a rank may finish writing before the checkpoint fails."""
    pool_bytes: int | None = Field(ge=0)
    """Most host memory of a rank for what is not on disk when the next update comes; null = enough
    for all of it. Less makes the update wait for a slow disk."""
    on_error: Literal["stop", "continue"]
    """What a checkpoint that cannot be written does to the run; `continue` keeps the last good
    one, and says so."""
    verify: bool
    """Compare the digests of all that is read when a run goes on."""
    fallback: bool
    """Go on from an older checkpoint when the newest turns out to be damaged."""
    tiers: TiersConfig
    """Places besides the run directory."""
