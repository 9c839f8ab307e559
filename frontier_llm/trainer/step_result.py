"""What a rank tells all other ranks in a step, and what all ranks know after it."""

from dataclasses import dataclass

from frontier_llm.geometry.wire import Sent


@dataclass(frozen=True)
class Saving:
    """The places to which rank 0 is still writing a checkpoint from its states or host memory.

    A checkpoint that rank 0 no longer writes has been written by all ranks, or has failed.
    """

    shared: bool = False
    """The run directory."""
    local: bool = False
    """The disk of the node."""


@dataclass(frozen=True)
class StepFlags:
    """What one rank tells all other ranks in the all-reduce of a step."""

    stop: bool = False
    """Whether this rank was asked to stop."""
    checkpoint_failed: bool = False
    """Whether this rank's last checkpoint failed."""
    checkpoint_committed: bool = False
    """Whether this rank knows of a committed checkpoint about which callbacks were not told yet."""
    saving: Saving = Saving()
    """What this rank is writing. Only the value of rank 0 is used."""
    digest: int = 0
    """Digest of this replica's samples (data/batch.py). Only the digest of one rank of each replica
    is used."""


@dataclass(frozen=True)
class StepResult:
    """Numbers of a step that are the same on all ranks."""

    loss: float
    """Mean cross entropy over the samples of the step, in nats per token, without z-loss."""
    grad_norm: float
    """L2 norm of the gradient of the whole model, before clipping."""
    samples: int
    """Number of samples processed by all replicas."""
    skipped: bool
    """Whether the update was skipped because a gradient was not finite."""
    loss_scale: float
    """Factor by which the loss of this step was multiplied (fp16); 1 in other precisions."""
    digest: int
    """Digest of all samples of the step (data/batch.py)."""
    stop: bool
    """Whether any rank was asked to stop."""
    checkpoint_failed: bool
    """Whether the last checkpoint failed on any rank."""
    checkpoint_committed: bool
    """Whether all ranks know of a committed checkpoint about which callbacks were not told yet."""
    sent: dict[str, Sent]
    """Bytes that all ranks sent inside and between nodes, by the name of the collective."""
    unquantised: dict[str, Sent]
    """Bytes that the quantised collectives would have sent in the compute precision."""
    saving: Saving = Saving()
    """What rank 0 was writing before the update."""
    z_loss: float | None = None
    """Mean z-loss over the samples of the step; None without z-loss."""
