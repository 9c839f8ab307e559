"""What a checkpoint holds in addition to the states: counters, corpus, configuration."""

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import CheckpointError
from frontier_llm.launch.coordination import broadcast_from_rank_zero
from frontier_llm.launch.world import World
from frontier_llm.trainer.ledger_file import BlendSegment
from frontier_llm.trainer.loss_scale import LossScale
from frontier_llm.trainer.progress import Progress

if TYPE_CHECKING:
    from torch.distributed import Store

    from frontier_llm.trainer.context import TrainingData

_Count = Annotated[int, Field(ge=0, le=10**18)]


class _Values(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Counters(_Values):
    step: _Count
    next_sample: _Count
    samples: _Count = 0
    updates: _Count
    bad_steps: _Count = 0
    rewinds: _Count = 0
    recent_losses: list[float | None] = []


class _LossScale(_Values):
    value: Annotated[float, Field(gt=0)] = 1.0
    good_steps: _Count = 0


class _Meta(_Values):
    progress: _Counters
    loss_scale: _LossScale
    corpus: str
    blend: list[BlendSegment] | None = None
    config: dict[str, Any]


def check_meta(folder: object, meta: dict[str, Any]) -> None:
    """Check what a checkpoint of a run stores in addition to the states.

    Args:
        folder: the checkpoint's folder, for the error message.
        meta: its plain JSON.

    Raises:
        CheckpointError: a value is absent, or of another type or size.
    """
    try:
        _Meta.model_validate(meta)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{folder} is damaged at meta.{where}: {first['msg']}") from None


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
            "blend": data.blend.schedule.to_meta() if data.blend else None,
            "config": config.model_dump(mode="json"),
            "start": start,
        }

    return meta
