"""Start a run from its newest checkpoint or from initial weights, and return to a checkpoint."""

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import CheckpointError
from frontier_llm.geometry.lengths import sample_lengths
from frontier_llm.launch.coordination import broadcast_from_rank_zero
from frontier_llm.launch.world import World
from frontier_llm.saving.restorer import Resumed
from frontier_llm.trainer.progress import LossScale, Progress

if TYPE_CHECKING:
    from torch.distributed import Store

    from frontier_llm.trainer.context import TrainerContext, TrainingData


def checkpoint_meta(
    config: RunConfig,
    world: World,
    store: "Store",
    data: "TrainingData",
    progress: Progress,
    loss_scale: LossScale,
) -> Callable[[], dict[str, Any]]:
    """Return a function that returns what a checkpoint stores in addition to the states.

    Collective over all ranks: rank 0 sends a random id of this start of the run to all ranks. At a
    resume the id shows whether node-local checkpoints of several nodes come from the same start.
    """
    # Rank 0 may need long to build its model and data, and the other ranks wait for it.
    timeout = timedelta(seconds=config.watchdog.startup_seconds)
    start = broadcast_from_rank_zero(world, store, "start", lambda: uuid.uuid4().hex, timeout)

    def meta() -> dict[str, Any]:
        return {
            "progress": progress.to_meta(),
            "loss_scale": loss_scale.to_meta(),
            "corpus": data.corpus.manifest.digest,
            "tokenizer": data.corpus.manifest.tokenizer_sha256,
            **data.to_meta(),
            "config": config.model_dump(mode="json"),
            "start": start,
        }

    return meta


def start(context: "TrainerContext") -> Resumed | None:
    """Load the newest checkpoint of the run if `run.resume` allows it, or else initial weights.

    Collective over all ranks, like `rewind`. Returns the checkpoint; None for a new run.
    """
    run, checkpoints = context.config.run, context.checkpoints
    resumed = None if run.resume == "never" else _load_newest(context)
    if resumed is not None:
        context.data.resume(resumed.meta, context.progress.next_sample)
        checkpoints.tiers.prune(resumed.step)
    elif run.init_from:
        context.restorer.load_initial_weights(run.init_from, run.init_encoder_from)
    checkpoints.tiers.prepare()
    if resumed is not None and not resumed.is_rounded:
        if resumed.is_local:
            checkpoints.secure(resumed.step, resumed.meta)
        if resumed.is_joined:
            checkpoints.replace(resumed.step)
    return resumed


def rewind(context: "TrainerContext", reason: str) -> None:
    """Load the checkpoint before the last step, and continue with the samples after this step.

    Raises a CheckpointError if there is no such checkpoint.
    """
    progress, step = context.progress, context.progress.step
    next_sample, rewinds = progress.next_sample, progress.rewinds
    if _load_newest(context, before=step) is None:
        raise CheckpointError(
            f"step {step}: {reason}, and there is no checkpoint before it to go "
            "back to; a smaller checkpoint.every_steps saves sooner"
        )
    progress.next_sample, progress.rewinds = next_sample, rewinds
    # the loaded checkpoint has older counters, so a resume from it would not skip the samples
    context.checkpoints.replace(progress.step)


def _load_newest(context: "TrainerContext", before: int | None = None) -> Resumed | None:
    """Load states, counters and loss scale from the newest checkpoint of a step before `before`."""
    context.checkpoints.finish()
    context.train_step.sums = None  # from here on the states are no longer those of a step
    resumed = context.restorer.restore(before)
    if resumed is not None:
        stored = {"sequence_length": resumed.meta["config"]["data"]["sequence_length"]}
        config = context.config
        length = sample_lengths(config.model, config.data.model_copy(update=stored)).total
        context.progress.load_meta(resumed.meta["progress"], length)
        context.train_step.loss_scale.load_meta(resumed.meta["loss_scale"])
        # rounded moments do not count as saved: if the run stops here, it saves the states
        saved_step = None if resumed.is_rounded else context.progress.step
        context.checkpoints.saved_step = saved_step
    return resumed
