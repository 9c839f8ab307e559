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
from frontier_llm.trainer.ledger_file import BlendSegment, StoredLengths
from frontier_llm.trainer.loss_scale import LossScale
from frontier_llm.trainer.progress import Progress

if TYPE_CHECKING:
    from torch.distributed import Store

    from frontier_llm.trainer.context import TrainingData

_Count = Annotated[int, Field(ge=0, le=10**18)]


_STRICT = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Counters(BaseModel):
    model_config = _STRICT
    __pydantic_extra__: dict[str, _Count | list[float | None]]
    step: _Count
    next_sample: _Count
    updates: _Count


class _Meta(BaseModel):
    model_config = _STRICT
    progress: _Counters
    loss_scale: dict[str, Annotated[float, Field(ge=0)]]
    corpus: str
    blend: list[BlendSegment] | None = None
    lengths: Annotated[list[StoredLengths], Field(min_length=1)] | None = None
    config: dict[str, Any]


def check_meta(folder: object, meta: dict[str, Any]) -> None:
    """Check what a checkpoint of a run stores in addition to the states.

    Raises:
        CheckpointError: a value is absent, or of another type or size; the message has the folder.
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
            **data.to_meta(),
            "config": config.model_dump(mode="json"),
            "start": start,
        }

    return meta
