"""Coordination of all ranks through the store: broadcast from rank 0, and a common exit."""

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from frontier_llm.errors import FrontierError, RankFailure
from frontier_llm.launch.rendezvous import RankZeroLostError
from frontier_llm.launch.world import World

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

FOREVER = timedelta(days=20)
"""Nearly the longest time-out that the store supports: it counts milliseconds in 31 bits."""
_ACKNOWLEDGE_TIMEOUT = timedelta(seconds=10)
"""How long rank 0, if it failed, waits until the other ranks have read that it failed. Without a
limit it would wait forever for a rank that has ended."""
_KEYS_PER_REQUEST = 64
"""Values in one answer of the store's server."""
_EXIT_TIMEOUT = timedelta(seconds=120)
"""How long ranks wait for each other at the end; rank 0 may still be writing its report."""


def read_all(store: "Store", keys: Sequence[str]) -> list[bytes]:
    """Return the values of many keys, one per rank, that are set or will be.

    The server's time for an answer grows with the square of its size (2.4 s for 9,600 values of
    10 kB, against 0.04 s in parts), and during it the server hears no other rank.
    """
    parts = [keys[i : i + _KEYS_PER_REQUEST] for i in range(0, len(keys), _KEYS_PER_REQUEST)]
    return [value for part in parts for value in store.multi_get(list(part))]


def meet(store: "Store", key: str, ranks: int, timeout: timedelta) -> None:
    """Wait until so many ranks have called this with a key, which is used once.

    A RuntimeError of the store follows the timeout.
    """
    if store.add(key, 1) == ranks:
        store.set(f"{key}/all", "")
    store.wait([f"{key}/all"], timeout)


def broadcast_from_rank_zero(
    world: World, store: "Store", key: str, make: Callable[[], str], timeout: timedelta
) -> str:
    """Call `make` on rank 0 and return its text on every rank.

    Collective over all ranks, through the store only: no process group is needed. A key may be used
    only once per job. If `make` failed, the other ranks raise a RankFailure with rank 0's exit code
    and no message, since rank 0 reports the failure. Raises a RankZeroLostError if rank 0 ended
    without an answer, or `make` took longer than `timeout`.
    """
    if world.rank == 0:
        return _make_and_publish(world, store, key, make)
    answer = _read(world, store, key, timeout)
    if "text" in answer:
        return str(answer["text"])
    error = RankFailure()
    error.exit_code = int(answer["exit_code"])
    _count(world, store, f"{key}/acknowledged")
    raise error


def _make_and_publish(world: World, store: "Store", key: str, make: Callable[[], str]) -> str:
    try:
        text = make()
    except BaseException as error:
        code = error.exit_code if isinstance(error, FrontierError) else 1
        store.set(key, json.dumps({"exit_code": code}))
        _wait_for_others(world, store, f"{key}/acknowledged", _ACKNOWLEDGE_TIMEOUT)
        raise
    store.set(key, json.dumps({"text": text}))
    return text


def _read(world: World, store: "Store", key: str, timeout: timedelta) -> dict[str, str | int]:
    try:
        store.wait([key], timeout)
        answer: dict[str, str | int] = json.loads(store.get(key))
    except RuntimeError as error:
        raise RankZeroLostError(
            f"rank {world.rank} on {world.host} got no answer ({key}) from rank 0 at "
            f"{world.master_address}:{world.master_port} within {timeout.total_seconds():.0f} s "
            f"({str(error).splitlines()[0]}); see the messages of rank 0"
        ) from None
    return answer


def wait_for_exit(world: World, store: "Store") -> None:
    """Wait until all ranks are done; rank 0 also until the others no longer need its store.

    No rank may exit while another one still works: rank 0 holds the store, and srun ends a job step
    when its first task exits with a non-zero code.
    """
    if world.rank:
        _count(world, store, "done")
        _wait_for(store, "done/exit", _EXIT_TIMEOUT)
        _count(world, store, "exited")
    else:
        _wait_for_others(world, store, "done", _EXIT_TIMEOUT)
        store.set("done/exit", "")
        _wait_for_others(world, store, "exited", _EXIT_TIMEOUT)


def _count(world: World, store: "Store", key: str) -> None:
    """Count this rank; the last rank other than rank 0 sets `key/all`."""
    if store.add(key, 1) == world.size - 1:
        store.set(f"{key}/all", "")


def _wait_for_others(world: World, store: "Store", key: str, timeout: timedelta) -> None:
    """Wait on rank 0 until `_count` has counted all other ranks."""
    if world.size > 1:
        _wait_for(store, f"{key}/all", timeout)


def _wait_for(store: "Store", key: str, timeout: timedelta) -> None:
    try:
        store.wait([key], timeout)
    except RuntimeError:
        pass  # a rank has ended early; waiting longer cannot help
