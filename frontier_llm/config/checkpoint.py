"""When and where a run saves checkpoints, and what happens when saving fails."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.paths import NodePathName
from frontier_llm.config.section import Section


class LocalTierConfig(Section):
    """Checkpoints on a local disk of each node. They are fast, but lost if the node is lost."""

    path: NodePathName | None
    """A directory that exists on every node (`/mnt/bb/$USER` on Frontier); null = no local
    checkpoints."""
    every_steps: int = Field(ge=1)
    """Steps between two local checkpoints."""
    keep: int = Field(ge=1)
    """Number of local checkpoints that are kept; older ones are deleted."""


class ArchiveConfig(Section):
    """A command that copies checkpoints of the run directory to an archive, for example a tape."""

    command: str | None = None
    """A shell command that rank 0 runs while training continues; `$CHECKPOINT` is the folder of the
    checkpoint, which is not deleted meanwhile. A failure never ends the run. null = no archive."""
    every_steps: int = Field(1, ge=1)
    """Checkpoints of the run directory whose step is a multiple of this number are archived."""
    tries: int = Field(4, ge=1)
    """How often the command is run for a checkpoint until it succeeds. If all tries fail, the
    checkpoint is tried once more after the next one is archived, and at the end of the run."""
    pause_seconds: float = Field(10.0, ge=0)
    """Pause after the first try; each further pause is three times as long."""


class TiersConfig(Section):
    """Places for checkpoints besides the run directory."""

    local: LocalTierConfig
    """A local disk of each node."""
    archive: ArchiveConfig = Field(default_factory=ArchiveConfig)
    """An archive of checkpoints of the run directory."""


class CheckpointConfig(Section):
    """Checkpoints in `run.dir/checkpoints`, on a file system that all nodes share.

    Paper: DataStates-LLM (arXiv:2406.10707).
    """

    mode: Literal["off", "blocking", "lazy"]
    """`lazy`: a checkpoint is written while training continues; `blocking`: training waits until
    it is written; `off`: no checkpoint is written, not even at the end."""
    every_steps: int = Field(ge=1)
    """Steps between two checkpoints. The last step of a run is always saved."""
    keep: int = Field(ge=1)
    """Number of checkpoints that are kept; older ones are deleted."""
    keep_every_steps: int | None = Field(ge=1)
    """Checkpoints whose step is a multiple of this number are never deleted; null = any checkpoint
    may be deleted."""
    files: Literal["rank", "node"]
    """`rank`: each rank writes its own file; `node`: the ranks of a node write one file together,
    so that a parallel file system has fewer files to handle."""
    timeout_seconds: float = Field(gt=0)
    """Seconds that ranks wait for the slowest rank after they have written their part. After this
    time the checkpoint fails."""
    pool_bytes: int | None = Field(None, ge=0)
    """Limit of the host memory per rank, in bytes, for the checkpoints of all tiers. It holds
    copies of states that are not yet on disk when the optimizer changes them, and the few buffers
    of the threads that write and copy files. null = as much memory as all states need once."""
    when_busy: Literal["wait", "skip"] = "wait"
    """What happens if a checkpoint is due while the one before it is still being written to the
    same place. `wait`: it begins, too, and if the memory is full the update waits for the disk;
    `skip`: it is not written, which is counted, so that each checkpoint takes as many steps as the
    disk needs. If the memory is too small for one checkpoint, the update waits in both cases."""
    partner: bool = False
    """Whether each node's local checkpoints are also copied to the disk of the next node, so that
    they survive the loss of a node."""
    protection_minutes: float | None = Field(None, gt=0)
    """Minutes after which a run ends if no copy to the next node has succeeded meanwhile. A failed
    copy is only a warning until then, and the metric steps_since_copy counts the steps that a lost
    node would cost. null = the run never ends for this reason."""
    moments: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format of Adam's moments in local checkpoints that are not copied to the run directory.
    `bf16` and `int8` round them, so that fewer bytes are written (8 and 6.03 instead of 12 per
    parameter). Local checkpoints that are copied, and all others, are exact. AdamW only."""
    drain_mb_per_second: float | None = Field(None, gt=0)
    """Limit per node in MB/s at which local checkpoints are copied to the run directory and to the
    next node. null = no limit, at the priority of idle input and output."""
    on_error: Literal["stop", "continue"]
    """What happens if a checkpoint cannot be written. `stop`: the run ends; `continue`: the run
    prints a warning, keeps the last good checkpoint and goes on."""
    end_seconds: float | None = Field(900.0, gt=0)
    """With local checkpoints and `lazy`: seconds that the end of a run waits until the run
    directory has the last step and all copies. After this time the last step is saved on the nodes'
    disks, and the run ends with an error. null = no limit."""
    verify: bool
    """Whether a resuming run checks the digests of all checkpoint data that it reads."""
    fallback: bool
    """Whether a run resumes from an older checkpoint if the newest one is damaged."""
    tiers: TiersConfig
    """Places for checkpoints besides the run directory."""

    @property
    def has_partner(self) -> bool:
        """Whether local checkpoints are copied to the next node."""
        return self.partner and self.tiers.local.path is not None

    @property
    def has_reduced_moments(self) -> bool:
        """Whether some local checkpoints have moments in fewer bits."""
        return self.moments != "fp32" and self.tiers.local.path is not None
