"""What a rank tells all other ranks in a step, and what all ranks know after it."""

import math
from dataclasses import dataclass, replace

from frontier_llm.geometry.wire import Sent
from frontier_llm.trainer.totals import read_totals

CHECKPOINT_FAILED = 2.0**32
"""Each rank adds this number to a sum if its checkpoint has failed, and 1 if the checkpoint is
committed. One sum thus tells whether any rank has failed, and how many ranks know of the commit."""


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
class StepSums:
    """The sums over all ranks by which a step was updated. They are equal on all ranks."""

    step: int
    """Number of the step."""
    loss_scale: float
    """Factor by which the loss of the step was multiplied."""
    skipped: bool
    """Whether the update was skipped."""
    numbers: tuple[float, ...]
    """Result of `Totals.reduce`, on the host."""


@dataclass(frozen=True)
class StepResult:
    """Numbers of a step that are the same on all ranks."""

    loss: float
    """Mean cross entropy of the step (`data.loss_mean`), in nats per token, without z-loss."""
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
    """Mean z-loss of the step; None without z-loss."""

    def without_checkpoint_news(self) -> "StepResult":
        """Return a copy in which no checkpoint is being written, committed or failed."""
        return replace(self, checkpoint_failed=False, checkpoint_committed=False, saving=Saving())

    @classmethod
    def of(cls, sums: StepSums, ranks: int, *, has_z_loss: bool) -> "StepResult":
        """Compute the numbers from the sums over all ranks.

        Args:
            sums: the sums of the step.
            ranks: number of ranks.
            has_z_loss: whether the loss has a z-loss.
        """
        values, sent, unquantised = read_totals(sums.numbers)
        weight = values["weight"] or math.nan
        scale = sums.loss_scale * weight / values["samples"]
        return cls(
            loss=values["loss_sum"] / weight,
            z_loss=values["z_loss_sum"] / weight if has_z_loss else None,
            grad_norm=math.sqrt(values["squared_norm"]) / scale,
            samples=round(values["samples"]),
            skipped=sums.skipped,
            loss_scale=sums.loss_scale,
            digest=round(values["digest"]),
            stop=values["stop"] > 0,
            checkpoint_failed=values["checkpoint"] >= CHECKPOINT_FAILED,
            checkpoint_committed=values["checkpoint"] == ranks,
            saving=Saving(shared=values["saving_shared"] > 0, local=values["saving_local"] > 0),
            sent=sent,
            unquantised=unquantised,
        )
