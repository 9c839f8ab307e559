"""What rank 0 does once and all ranks need, through the store; and the order of leaving it."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from frontier_llm.errors import FrontierError, RankFailure, StopRequested
from frontier_llm.parallel.world import RankZeroLostError, World

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_HEARING = timedelta(seconds=10)
"""For the others to hear of a failure of rank 0; some may be gone."""
_LEAVING = timedelta(seconds=120)
"""Rank 0 may write its report meanwhile."""


def made_once(
    world: World, store: "Store", key: str, make: Callable[[], str], timeout: timedelta
) -> str:
    """Have rank 0 call `make` and return its text on every rank.

    Collective over all ranks, through the store alone: no process group is needed.

    Args:
        world: this process's place.
        store: where the ranks met.
        key: name of the text, used once.
        make: called on rank 0 only.
        timeout: how long the others wait for it.

    Raises:
        RankFailure: on the other ranks, if `make` failed: without a message, since rank 0 says
            it, and with rank 0's exit code.
        RankZeroLostError: rank 0 ended without a word, or `make` took longer than `timeout`.
    """
    if world.rank == 0:
        return _make(world, store, key, make)
    answer = _read(world, store, key, timeout)
    if "text" in answer:
        return str(answer["text"])
    error = RankFailure()
    error.exit_code = int(answer["exit_code"])
    _count(world, store, f"{key}/heard")
    raise error


def run_and_leave(target: Callable[[World, "Store"], None], world: World, store: "Store") -> None:
    """Call `target(world, store)`, then leave the store together: rank 0, who holds it, last.

    Does not wait for anybody if `target` fails.
    """
    try:
        target(world, store)
    except StopRequested:
        _leave(world, store)
        raise
    _leave(world, store)


def _make(world: World, store: "Store", key: str, make: Callable[[], str]) -> str:
    try:
        text = make()
    except BaseException as error:
        code = error.exit_code if isinstance(error, FrontierError) else 1
        store.set(key, json.dumps({"exit_code": code}))
        _wait_for_others(world, store, f"{key}/heard", _HEARING)
        raise
    store.set(key, json.dumps({"text": text}))
    return text


def _read(world: World, store: "Store", key: str, timeout: timedelta) -> dict[str, str | int]:
    try:
        store.wait([key], timeout)
        answer: dict[str, str | int] = json.loads(store.get(key))
    except RuntimeError as error:
        raise RankZeroLostError(
            f"rank {world.rank} on {world.host} waited for rank 0's {key} at "
            f"{world.master_address}:{world.master_port} in vain "
            f"({str(error).splitlines()[0]}); see what rank 0 says"
        ) from None
    return answer


def _leave(world: World, store: "Store") -> None:
    """Go when everybody is done, rank 0 last.

    srun ends a step when its first task leaves with a code: rank 0 must not be at its report then.
    """
    if world.rank:
        _count(world, store, "left")
        _wait_for(store, "left/together", _LEAVING)
        _count(world, store, "gone")
    else:
        _wait_for_others(world, store, "left", _LEAVING)
        store.set("left/together", "")
        _wait_for_others(world, store, "gone", _LEAVING)


def _count(world: World, store: "Store", key: str) -> None:
    """Count this rank; the last of those that are not rank 0 says so."""
    if store.add(key, 1) == world.size - 1:
        store.set(f"{key}/all", "")


def _wait_for_others(world: World, store: "Store", key: str, patience: timedelta) -> None:
    if world.size > 1:
        _wait_for(store, f"{key}/all", patience)


def _wait_for(store: "Store", key: str, patience: timedelta) -> None:
    try:
        store.wait([key], patience)
    except RuntimeError:
        pass  # somebody is gone: nothing is left to wait for
