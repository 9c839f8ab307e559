"""What a checkpoint holds in addition to the states: counters, corpus, configuration."""

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from frontier_llm.config.run import RunConfig
from frontier_llm.launch.coordination import broadcast_from_rank_zero
from frontier_llm.launch.world import World
from frontier_llm.trainer.context import TrainingData
from frontier_llm.trainer.loss_scale import LossScale
from frontier_llm.trainer.progress import Progress

if TYPE_CHECKING:
    from torch.distributed import Store


def checkpoint_meta(
    config: RunConfig,
    world: World,
    store: "Store",
    data: TrainingData,
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
