"""The alarm in torch's key-value store, by which the watchdogs of all ranks tell each other.

Keys, all below `watchdog/`:

- `alarm/N`: `alarm` when the alarm is raised on rank N, `closed` when rank N has ended its watch.
- `state/N`: what rank N did when the alarm was raised.
- others: see watchdog.py.
"""

from torch.distributed import Store

from frontier_llm.health.diagnosis import RankState
from frontier_llm.launch.coordination import FOREVER, read_all

_CLOSED = b"closed"


def key(name: str) -> str:
    """Return a key of the watchdogs."""
    return f"watchdog/{name}"


def raise_alarm(store: Store, size: int) -> None:
    """Raise the alarm on all ranks that have not ended their watch."""
    for rank in range(size):
        store.compare_set(_alarm(rank), "", "alarm")  # sets only a key that is absent


def close(store: Store, rank: int) -> None:
    """Announce that a rank has ended its watch, which also ends `wait_for_alarm`."""
    store.set(_alarm(rank), _CLOSED.decode())


def withdraw(store: Store, rank: int) -> None:
    """Take back the alarm on a rank."""
    store.delete_key(_alarm(rank))


def wait_for_alarm(store: Store, rank: int) -> None:
    """Wait until the alarm is raised on a rank, or the rank has ended its watch."""
    while True:
        try:
            store.wait([_alarm(rank)], FOREVER)
            return
        except RuntimeError:  # a time-out, or a lost store; if it is lost, `check` raises too
            if store.check([_alarm(rank)]):
                return


def closed_ranks(store: Store, size: int) -> set[int]:
    """Return the ranks that have ended their watch, after the alarm was raised."""
    values = read_all(store, [_alarm(rank) for rank in range(size)])
    return {rank for rank, value in enumerate(values) if value == _CLOSED}


def only_first_is_left(store: Store, size: int) -> bool:
    """Return whether all ranks but rank 0 have ended their watch."""
    others = [_alarm(rank) for rank in range(1, size)]
    if not others:
        return True
    return store.check(others) and all(value == _CLOSED for value in read_all(store, others))


def read_states(store: Store, size: int) -> dict[int, RankState]:
    """Return the states of the ranks that have reported them, by rank."""
    states = {}
    for rank in range(size):
        if store.check([key(f"state/{rank}")]):
            states[rank] = RankState.from_json(store.get(key(f"state/{rank}")))
    return states


def _alarm(rank: int) -> str:
    return key(f"alarm/{rank}")
