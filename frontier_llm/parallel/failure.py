"""What a rank leaves behind when it fails, and which rank's failure was the cause.

One fault ends every rank: the others lose their peer in the middle of a collective. Each writes
`rank_N.json`; the cause is chosen from all of them, and it alone is shown. What can have been the
cause by itself is also in `cause.json`: of thousands of ranks none has to read the words of all.
"""

import json
import os
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from frontier_llm.errors import FrontierError, RankFailure, StopRequested

Kind = Literal["user", "error", "died", "stopped", "echo", "timeout"]
_CAUSE = "cause.json"
# An error and a death of the same job are told apart by time alone: what one of the two made of
# the other ranks need not look like a network's error.
_ORDER = {"user": 0, "error": 1, "died": 1, "timeout": 2, "echo": 3, "stopped": 4}
_ECHO_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError")
_ECHO_WORDS = (
    "connection reset by peer", "connection closed by peer", "connection refused",
    "broken pipe", "socket closed", "remote process exited", "connection was likely closed",
    "communicator was aborted", "ncclremoteerror", "failed to recv", "failed to send",
)  # fmt: skip
_TIMEOUT_WORDS = ("timed out waiting", "timeout waiting", "wait timeout", "collectivetimeout",
                  "watchdog caught collective operation timeout")  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """How one rank ended, if not well."""

    rank: int
    seconds: float
    """When, by the clock of the host."""
    kind: Kind
    """`user`: says what to do; `error`: our own mistake; `died`: by a signal or without a word;
    `timeout` and `echo`: another rank was lost; `stopped`: on request."""
    name: str
    """Class of the exception, or name of the signal."""
    message: str
    """What a user reads; for `error`, the traceback follows."""
    traceback: str
    exit_code: int

    @property
    def is_primary(self) -> bool:
        """Whether this can have been the cause by itself."""
        return self.kind in ("user", "error", "died")


def describe(rank: int, error: BaseException) -> Failure:
    """Turn an exception into this rank's failure."""
    code = getattr(error, "exit_code", 1) if isinstance(error, FrontierError) else 1
    return Failure(
        rank=rank,
        seconds=time.time(),
        kind=_kind(error),
        name=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        exit_code=code,
    )


def is_lost_contact(error: BaseException) -> bool:
    """Whether the network told of the loss of another rank, and nobody has said which."""
    return not isinstance(error, FrontierError) and _kind(error) == "echo"


def died(rank: int, code: int, seconds: float) -> Failure:
    """Describe a rank that left no file: its exit code (< 0: a signal), seen at `seconds`."""
    if code >= 0:
        name, text = f"exit code {code}", f"rank {rank} ended with exit code {code} and no word"
    else:
        name = signal.Signals(-code).name
        text = f"rank {rank} was killed by {name}"
    if code == -signal.SIGKILL:
        text += (
            ": probably out of memory (the kernel kills the largest process); lower "
            "data.micro_batch or the number of ranks on this machine"
        )
    return Failure(rank, seconds, "died", name, text, "", 1)


def write(failure: Failure, folder: Path) -> None:
    """Write `rank_N.json` in one step, so that nobody reads half of it.

    A cause that a thread of the rank has written stays: what its main thread meets then follows
    from it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    earlier = of_rank(failure.rank, folder)
    if earlier is not None and earlier.is_primary and not failure.is_primary:
        return
    _put(failure, _rank_file(failure.rank, folder))
    if failure.is_primary:
        known = known_cause(folder)
        if known is None or _order(failure) < _order(known):
            _put(failure, folder / _CAUSE)


def of_rank(rank: int, folder: Path) -> Failure | None:
    """Read one rank's failure; None if it left none."""
    return _read(_rank_file(rank, folder))


def known_cause(folder: Path) -> Failure | None:
    """Read the failure that explains the others, as far as ranks have told; None if none does."""
    return _read(folder / _CAUSE)


def read_all(folder: Path) -> list[Failure]:
    """Read every rank's failure in the order of the ranks; an absent folder has none."""
    found = [_read(path) for path in folder.glob("rank_*.json")]
    return sorted((failure for failure in found if failure), key=lambda failure: failure.rank)


def _rank_file(rank: int, folder: Path) -> Path:
    return folder / f"rank_{rank}.json"


def _put(failure: Failure, path: Path) -> None:
    part = path.with_name(f"{path.stem}_{failure.rank}.part")
    part.write_text(json.dumps(asdict(failure), indent=1))
    part.replace(path)


def _read(path: Path) -> Failure | None:
    try:
        return Failure(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def clear(folder: Path) -> None:
    """Remove what an earlier attempt left, so that it is not taken for the cause of a new one."""
    for path in folder.glob("rank_*.json"):
        path.unlink()
    for name in (_CAUSE, "first"):
        (folder / name).unlink(missing_ok=True)


def claim_first(rank: int, folder: Path) -> bool:
    """Whether this rank is the first of the job to claim that its failure was the cause."""
    try:
        descriptor = os.open(folder / "first", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as file:
        file.write(str(rank))
    return True


def cause(failures: Iterable[Failure]) -> Failure:
    """Choose the failure that explains the others: by kind, then the earliest.

    Of requests to stop rank 0 knows most: it alone looks for the STOP file and at the clock.
    """
    return min(failures, key=_order)


def _order(failure: Failure) -> tuple[int, float]:
    late = failure.rank if failure.kind == "stopped" else failure.seconds
    return _ORDER[failure.kind], late


def explain(chosen: Failure, failures: Iterable[Failure], size: int, folder: Path) -> str:
    """Say what went wrong, as the last words of the job.

    Args:
        chosen: the cause.
        failures: all that is known, the cause among them.
        size: number of ranks in the job.
        folder: where every rank's failure lies.
    """
    if chosen.kind in ("user", "stopped"):
        return chosen.message
    if chosen.kind == "timeout":
        return _explain_timeout(chosen, failures, size, folder)
    if chosen.kind == "echo":
        return _explain_echo(chosen, failures, size, folder)
    head = f"rank {chosen.rank} failed first (every rank's traceback: {folder}):"
    if chosen.kind == "died":
        return f"{head}\n{chosen.message}"
    return f"{head}\n{chosen.traceback.rstrip()}"


def _explain_echo(chosen: Failure, failures: Iterable[Failure], size: int, folder: Path) -> str:
    spoke = {failure.rank for failure in failures}
    silent = [rank for rank in range(size) if rank not in spoke]
    who = f"{_ranks(silent)}, which left no word" if silent else "another rank"
    one = "one of them" if len(silent) > 1 else "it"  # the others may wait for those that spoke
    return (
        f"{_ranks(sorted(spoke))} lost contact with {who}: {one} was killed (for want of memory?), "
        f"or its node is gone\nrank {chosen.rank} said: {chosen.message.splitlines()[0]}\n"
        f"every rank's traceback: {folder}"
    )


def _explain_timeout(chosen: Failure, failures: Iterable[Failure], size: int, folder: Path) -> str:
    waited = sorted(failure.rank for failure in failures if failure.kind in ("timeout", "echo"))
    absent = [rank for rank in range(size) if rank not in waited]
    who = (
        f"{_ranks(absent)} did not come to it (busy, hung, or gone another way)"
        if absent
        else "every rank waited: they were at different collectives"
    )
    return (
        f"a collective timed out: {_ranks(waited)} waited, {who}\n"
        f"rank {chosen.rank} said: {chosen.message.splitlines()[0]}\n"
        f"every rank's traceback: {folder}; launch.timeout_seconds sets the patience"
    )


def _ranks(ranks: list[int]) -> str:
    """Name ranks; of many, the first ones."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return "ranks " + ", ".join(map(str, ranks[:16])) + more


def _kind(error: BaseException) -> Kind:
    if isinstance(error, StopRequested):
        return "stopped"
    if isinstance(error, RankFailure):
        return "echo"
    if isinstance(error, FrontierError):
        return "user"
    text = str(error).lower()
    if any(word in text for word in _TIMEOUT_WORDS):
        return "timeout"
    if any(word in text for word in _ECHO_WORDS):
        return "echo"
    names = {base.__name__ for base in type(error).__mro__}
    return "echo" if names & set(_ECHO_TYPES) else "error"
