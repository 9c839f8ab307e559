"""What a rank tells all other ranks in a step, in one all-reduce, and what all know after it."""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import islice

import torch
import torch.distributed as dist

from frontier_llm.collectives.primitives import all_reduce
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.device.transfer import send
from frontier_llm.engine.update import UpdateChoice, choose_update
from frontier_llm.geometry.grid import LEVELS
from frontier_llm.geometry.wire import Sent
from frontier_llm.saving.checkpoints import SavingState

SCALARS = (
    "squared_norm",
    "loss_sum",
    "z_loss_sum",
    "samples",
    "weight",
    "digest",
    "stop",
    "checkpoint",
    "saving_to_run_dir",
    "saving_to_node",
    "ranks",
)
"""Names of the numbers that are summed; trainer/step.py computes each rank's addends."""
COLLECTIVES = (
    "gather_params", "reduce_grads", "reduce_states", "refresh_params", "sequence_norms",
    "tied_copies", "whole_matrices", "factored_moments",
    "tensor", "context", "pipeline", "totals",
)  # fmt: skip
"""Names of the collectives whose bytes are counted."""
QUANTISABLE = COLLECTIVES[:4]
"""Collectives that can be quantised."""


def reduce_totals(
    addends: dict[str, float | torch.Tensor], device: torch.device, traffic: Traffic
) -> torch.Tensor:
    """Sum the addends of all ranks by name, and the bytes that they have sent since the last call.

    Collective over all ranks. All get the same sums, so they make the same decisions. On a GPU the
    host does not wait. The bytes of this all-reduce count in the next call. Tensors among the
    addends lie on the device. Returns [numbers] fp64, on the device: the sums in the order of
    `SCALARS`, then those that `read_totals` explains.
    """
    sent, unquantised = traffic.take(), traffic.take_unquantised()
    unknown = set(sent) - set(COLLECTIVES)
    assert not unknown, f"collectives that are not in COLLECTIVES: {unknown}"
    values = [addends[name] for name in SCALARS]
    by_link = [sent.get(name, Sent()) for name in COLLECTIVES]
    by_link += [unquantised.get(name, Sent()) for name in QUANTISABLE]
    known = [0.0 if isinstance(value, torch.Tensor) else float(value) for value in values]
    known += [count for volume in by_link for count in astuple(volume)]
    vector = send(known, device)
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            vector[index].copy_(value)
    group = dist.group.WORLD
    assert group is not None
    all_reduce(vector, group, traffic, "totals").wait()
    return vector


def read_totals(
    numbers: Sequence[float],
) -> tuple[dict[str, float], dict[str, Sent], dict[str, Sent]]:
    """Explain the result of `reduce_totals`, after it was copied to the host.

    Returns the sums, by name; the bytes that all ranks have sent, by collective; and the bytes that
    quantised collectives would have sent in the compute precision, by collective.
    """
    sums = dict(zip(SCALARS, numbers, strict=False))
    byte_counts = iter(numbers[len(SCALARS) :])
    sent = {name: Sent(*islice(byte_counts, len(LEVELS))) for name in COLLECTIVES}
    as_if = {name: Sent(*islice(byte_counts, len(LEVELS))) for name in QUANTISABLE}
    return sums, sent, {name: volume for name, volume in as_if.items() if volume != sent[name]}


def choose_by_sums(
    totals: torch.Tensor, loss_scale: float, clip_norm: float | None, samples: int, ranks: int
) -> UpdateChoice:
    """Choose the update of a step; the host does not wait.

    It is skipped if the norm or the loss is not finite, or if the number of samples or ranks in the
    totals (`reduce_totals`) is wrong, for which the step then raises an error. Gradients are
    divided by the loss scale, multiplied by the weight per sample (`Batch.weight`).
    """
    sums = dict(zip(SCALARS, totals[: len(SCALARS)].unbind(), strict=True))
    is_complete = (sums["samples"] == samples) & (sums["ranks"] == ranks)
    return choose_update(
        sums["squared_norm"],
        sums["weight"] / sums["samples"] * loss_scale,
        clip_norm,
        sums["loss_sum"].isfinite() & is_complete,
    )


CHECKPOINT_FAILED = 2.0**32
"""Each rank adds this number to a sum if its checkpoint has failed, and 1 if the checkpoint is
committed. One sum thus tells whether any rank has failed, and how many ranks know of the commit."""


@dataclass(frozen=True)
class StepFlags:
    """What one rank tells all other ranks in the all-reduce of a step."""

    stop: bool = False
    """Whether this rank was asked to stop."""
    digest: int = 0
    """Digest of this replica's samples (data/batch.py). Only the digest of one rank of each replica
    is used."""
    saving: SavingState = field(default_factory=SavingState)


@dataclass(frozen=True)
class StepSums:
    """The sums over all ranks by which a step was updated. They are equal on all ranks."""

    step: int
    loss_scale: float
    """Factor by which the loss of the step was multiplied."""
    skipped: bool
    numbers: tuple[float, ...]
    """Result of `reduce_totals`, on the host."""


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
    """Factor by which the loss was multiplied (fp16); 1 in other precisions."""
    digest: int
    """Digest of all samples of the step (data/batch.py)."""
    stop: bool
    """Whether any rank was asked to stop."""
    sent: dict[str, Sent]
    """Bytes that all ranks sent inside and between nodes, by the name of the collective."""
    unquantised: dict[str, Sent]
    """Bytes that the quantised collectives would have sent in the compute precision."""
    saving: SavingState = field(default_factory=SavingState)
    """What was known of checkpoints before the update."""
    z_loss: float | None = None
    """Mean z-loss of the step; None without z-loss."""

    def without_checkpoint_news(self) -> "StepResult":
        """Return a copy in which no checkpoint is being written, committed or failed."""
        return replace(self, saving=SavingState())

    @classmethod
    def of(cls, sums: StepSums, ranks: int, *, has_z_loss: bool) -> "StepResult":
        """Compute the numbers of a step from its sums over a number of ranks."""
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
            saving=SavingState(
                failed=values["checkpoint"] >= CHECKPOINT_FAILED,
                committed=values["checkpoint"] == ranks,
                to_run_dir=values["saving_to_run_dir"] > 0,
                to_node=values["saving_to_node"] > 0,
            ),
            sent=sent,
            unquantised=unquantised,
        )
