"""Python objects that ranks exchange at the start of a run. All ranks call these functions."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from frontier_llm.errors import CheckpointError

T = TypeVar("T")


def of_rank_0(compute: Callable[[], T]) -> T:
    """Call a function on rank 0; return its result, or raise its CheckpointError, on every rank."""
    results: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            results = [compute()]
        except CheckpointError as error:
            results = [error]
    dist.broadcast_object_list(results, src=0)
    (result,) = results
    if isinstance(result, CheckpointError):
        raise result
    return cast(T, result)


def gathered(own: Any) -> list[Any]:
    """Return the objects of all ranks, in the order of the ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
