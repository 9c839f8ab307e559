"""Files that describe the failures of ranks, and the search for the failure that caused the others.

If one rank fails, all others fail too, because they lose contact with it in a collective. Each rank
(`run_rank`) writes its failure to `rank_N.json`. The cause is chosen among these failures, and only
the cause is printed. A failure that can be the cause is also written to `cause.json`, so that each
rank of a large job can read one file instead of thousands.
"""

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NoReturn

from frontier_llm.errors import FrontierError, RankFailure, StopRequested, flush_output, print_error
from frontier_llm.units import name_ranks

Kind = Literal["user", "watchdog", "error", "died", "stopped", "lost_contact", "timeout"]
_CAUSE_FILE = "cause.json"
_REPORTER_FILE = "reporter"
"""Holds the number of the rank that prints the full report."""
# The failure with the smallest number is the cause. `error` and `died` have equal numbers, so that
# the earlier of the two is the cause: a rank may fail with an ordinary error because another rank
# died, or die because another rank failed with an error.
_PRIORITY = {
    "user": 0, "watchdog": 1, "error": 2, "died": 2, "timeout": 3, "lost_contact": 4, "stopped": 5,
}  # fmt: skip
_memory: int | None = None
"""Descriptor of a file in memory for failures that no folder takes, for example because its file
system is full. The launcher makes it, and the ranks that it forks inherit it."""
_NETWORK_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError")
_NETWORK_WORDS = (
    "connection reset by peer", "connection closed by peer", "connection refused",
    "broken pipe", "socket closed", "remote process exited", "connection was likely closed",
    "communicator was aborted", "ncclremoteerror", "failed to recv", "failed to send",
)  # fmt: skip
_TIMEOUT_WORDS = ("timed out waiting", "timeout waiting", "wait timeout", "collectivetimeout",
                  "watchdog caught collective operation timeout")  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """How one rank ended, other than by completion."""

    rank: int
    seconds: float
    """Time of the failure in seconds since 1970, by the clock of the rank's host."""
    kind: Kind
    """`user`: an error whose message says what to do; `watchdog`: the watchdog found a rank that
    hangs or is gone, and the message names it; `error`: any other exception; `died`: the rank ended
    by a signal or without a message; `timeout`: a collective timed out; `lost_contact`:
    the network or a `RankFailure` (errors.py) showed that another rank has ended; `stopped`: the
    rank stopped on request."""
    name: str
    """Class of the exception, or name of the signal."""
    message: str
    """Text of the exception, or which signal ended the rank. If `kind` is `error`, the user sees
    `traceback`, which ends with this text; otherwise `explain` shows this text or its first
    line."""
    traceback: str
    """Traceback as text; empty if there is none."""
    exit_code: int

    @property
    def is_primary(self) -> bool:
        """Whether this failure can be the cause of the others."""
        return self.kind in ("user", "watchdog", "error", "died")


def from_exception(rank: int, error: BaseException) -> Failure:
    """Describe a rank that ended with an exception."""
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
    """Return whether an error of the network shows that another rank is lost."""
    return not isinstance(error, FrontierError) and _kind(error) == "lost_contact"


def is_timeout(error: BaseException) -> bool:
    """Return whether an error is a collective that timed out."""
    return not isinstance(error, FrontierError) and _kind(error) == "timeout"


def died(rank: int, code: int, seconds: float) -> Failure:
    """Describe a rank that ended without writing a failure.

    A negative code is the signal that ended the rank; `seconds` counts since 1970.
    """
    if code >= 0:
        name = f"exit code {code}"
        text = f"rank {rank} ended with exit code {code} and no error message"
    else:
        name = signal.Signals(-code).name
        text = f"rank {rank} was killed by {name}"
    if code == -signal.SIGKILL:
        text += (
            ", probably for lack of memory (the kernel kills the largest process): lower "
            "data.micro_batch or the number of ranks on this machine"
        )
    text += (
        "\n  do: repeat the command with the same run.dir to go on from the newest checkpoint, if "
        "one was saved"
    )
    return Failure(rank, seconds, "died", name, text, "", 1)


def in_one_line(failure: Failure) -> str:
    """Return the first line of a failure, with its rank."""
    if failure.kind == "died":
        return failure.message.partition(",")[0]
    first = failure.message.partition("\n")[0]
    return f"rank {failure.rank} failed with {failure.name}" + (f": {first}" if first else "")


def write(failure: Failure, folder: Path) -> None:
    """Write `rank_N.json` atomically.

    If another thread of the rank has written a primary failure, a failure that is not primary is a
    consequence of it and is not written. In all other cases the later failure replaces the earlier.
    A primary failure is also written to `cause.json`, unless a more likely cause is there. If the
    folder cannot be written, the launcher of this machine gets the failure through memory, or an
    OSError is raised without such a launcher.
    """
    try:
        _write_to_folder(failure, folder)
    except OSError:
        if _memory is None:
            raise
        os.write(_memory, json.dumps(asdict(failure)).encode() + b"\n")  # ranks share its offset


def _write_to_folder(failure: Failure, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    earlier = read_rank(failure.rank, folder)
    if earlier is not None and earlier.is_primary and not failure.is_primary:
        return
    _write_file(failure, _rank_file(failure.rank, folder))
    if failure.is_primary:
        current_cause = read_cause(folder)
        if current_cause is None or _order(failure) < _order(current_cause):
            _write_file(failure, folder / _CAUSE_FILE)


def read_rank(rank: int, folder: Path) -> Failure | None:
    """Read the failure of one rank; return None if it has written none."""
    in_memory = (failure for failure in _read_memory() if failure.rank == rank)
    return _read(_rank_file(rank, folder)) or next(in_memory, None)


def read_cause(folder: Path) -> Failure | None:
    """Read the most likely cause written so far; return None if no rank has written one."""
    return _read(folder / _CAUSE_FILE)


def read_all(folder: Path) -> list[Failure]:
    """Read the failures of all ranks, by ascending rank; the folder may be absent."""
    failures = [_read(path) for path in folder.glob("rank_*.json")]
    failures += _read_memory()
    return sorted((failure for failure in failures if failure), key=lambda failure: failure.rank)


def _read_memory() -> list[Failure]:
    if _memory is None:
        return []
    lines = os.pread(_memory, os.fstat(_memory).st_size, 0).splitlines()
    return [Failure(**json.loads(line)) for line in lines]


def _rank_file(rank: int, folder: Path) -> Path:
    return folder / f"rank_{rank}.json"


def _write_file(failure: Failure, path: Path) -> None:
    temporary = path.with_name(f"{path.stem}_{failure.rank}.part")
    temporary.write_text(json.dumps(asdict(failure), indent=1))
    temporary.replace(path)


def _read(path: Path) -> Failure | None:
    try:
        return Failure(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def clear(folder: Path) -> None:
    """Remove the failures of an earlier attempt. The launcher does so before it forks ranks."""
    global _memory
    if _memory is None:
        _memory = os.memfd_create("failures") if hasattr(os, "memfd_create") else None
    else:
        os.ftruncate(_memory, 0)
        os.lseek(_memory, 0, os.SEEK_SET)
    for path in folder.glob("rank_*.json"):
        path.unlink()
    for name in (_CAUSE_FILE, _REPORTER_FILE):
        (folder / name).unlink(missing_ok=True)


def claim_report(rank: int, folder: Path) -> bool:
    """Claim the right to print the full report; return False if another rank has claimed it."""
    try:
        descriptor = os.open(folder / _REPORTER_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as file:
        file.write(str(rank))
    return True


def cause(failures: Iterable[Failure]) -> Failure:
    """Choose the failure that caused the others: the earliest one of the most likely kind.

    If ranks only stopped on request, rank 0's message is chosen: only rank 0 checks the STOP file
    and the time limit, so only its message names the reason.
    """
    return min(failures, key=_order)


def _order(failure: Failure) -> tuple[int, float]:
    tie_break = failure.rank if failure.kind == "stopped" else failure.seconds
    return _PRIORITY[failure.kind], tie_break


def explain(chosen: Failure, failures: Iterable[Failure], size: int, folder: Path) -> str:
    """Return the final message of a failed job.

    Args:
        chosen: the failure that was the cause.
        failures: all known failures, including the cause.
        size: number of ranks in the job.
        folder: the message names it as the one with the failures of all ranks.
    """
    if chosen.kind in ("user", "watchdog", "stopped"):
        return chosen.message
    if chosen.kind == "timeout":
        return _explain_timeout(chosen, failures, size, folder)
    if chosen.kind == "lost_contact":
        return _explain_lost_contact(chosen, failures, size, folder)
    where = f" (tracebacks of all ranks: {folder})" if any(f.traceback for f in failures) else ""
    head = f"rank {chosen.rank} failed first{where}:"
    if chosen.kind == "died":
        return f"{head}\n{chosen.message}"
    return f"{head}\n{chosen.traceback.rstrip()}"


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    exit_code: int
    """0, or the exit code of the failure that was the cause of the others."""
    cause: Failure | None = None
    """This failure; None if the job is done, or was killed by a second Ctrl-C."""


def report_cause(died: Mapping[int, Failure], size: int, folder: Path) -> Ended:
    """Print the cause of a failure of a job of `size` ranks, and return how the job ended.

    `died` has the failures of ranks that ended without writing one to the folder.
    """
    written = {failed.rank: failed for failed in read_all(folder)}
    failures = {**died, **written}
    if not failures:
        return Ended(0)
    chosen = cause(failures.values())
    print_error(explain(chosen, failures.values(), size, folder))
    if chosen.kind == "stopped":  # then all are, and there is no failure to look at
        with suppress(OSError):
            clear(folder)
            folder.rmdir()
    return Ended(chosen.exit_code, chosen)


def _explain_lost_contact(
    chosen: Failure, failures: Iterable[Failure], size: int, folder: Path
) -> str:
    reported = {failure.rank for failure in failures}
    silent = [rank for rank in range(size) if rank not in reported]
    lost = f"{name_ranks(silent)}, which left no error message" if silent else "another rank"
    # of several silent ranks perhaps only one is dead, and the others wait for other ranks
    dead = "one of them" if len(silent) > 1 else "it"
    return (
        f"{name_ranks(sorted(reported))} lost contact with {lost}: {dead} was killed "
        "(out of memory?) or its node failed\n"
        f"first error, on rank {chosen.rank}: {chosen.message.splitlines()[0]}\n"
        f"tracebacks of all ranks: {folder}"
    )


def _explain_timeout(chosen: Failure, failures: Iterable[Failure], size: int, folder: Path) -> str:
    waited = sorted(
        failure.rank for failure in failures if failure.kind in ("timeout", "lost_contact")
    )
    absent = [rank for rank in range(size) if rank not in waited]
    reason = (
        f"{name_ranks(absent)} did not join it (busy, hung, or in another part of the program)"
        if absent
        else "every rank waited: they were in different collectives"
    )
    return (
        f"a collective timed out: {name_ranks(waited)} waited, {reason}\n"
        f"first error, on rank {chosen.rank}: {chosen.message.splitlines()[0]}\n"
        f"tracebacks of all ranks: {folder}; launch.timeout_seconds sets the time limit"
    )


def _kind(error: BaseException) -> Kind:
    if isinstance(error, StopRequested):
        return "stopped"
    if isinstance(error, RankFailure):
        return "lost_contact"
    if isinstance(error, FrontierError):
        return "user"
    text = str(error).lower()
    if any(word in text for word in _TIMEOUT_WORDS):
        return "timeout"
    if any(word in text for word in _NETWORK_WORDS):
        return "lost_contact"
    names = {base.__name__ for base in type(error).__mro__}
    return "lost_contact" if names & set(_NETWORK_ERRORS) else "error"


_PATIENCE_SECONDS = 2.0
"""How long a rank that lost contact waits for the failed rank to write the cause."""
_POLL_SECONDS = 0.25
_PRINTING_RANKS = 16
"""Only this many ranks print a line: thousands of lines would hide the cause."""


def run_rank(work: Callable[[], None], rank: int | Callable[[], int], folder: Path) -> int:
    """Do the work of a rank and return its exit code; write `rank_N.json` if it fails.

    A function as `rank` is called at the time of the failure.
    """
    try:
        work()
    except BaseException as error:
        rank = rank if isinstance(rank, int) else rank()
        failed = from_exception(rank, error)
        try:
            write(failed, folder)
        except OSError as write_error:  # the rank may have failed because the disk is full
            print_error(f"[rank {rank}] {failed.message}\n(not written to {folder}: {write_error})")
        return failed.exit_code
    return 0


def report_failure(rank: int, size: int, folder: Path, code: int) -> int:
    """Print why this rank failed and return its exit code; for ranks started by srun or torchrun.

    The rank whose failure was the cause prints its failure in full. A rank that lost contact waits
    up to 2 s for the file with the cause, then prints one line. All ranks may call this at the same
    time on a shared file system: each reads its own file and the file with the cause; at most one
    rank reads the files of all ranks.
    """
    own = read_rank(rank, folder)
    if own is None:
        return code  # the failure could not be written, and run_rank has printed it
    if own.kind == "stopped":
        if rank == 0:
            print_error(own.message)
        return own.exit_code
    cause = own if own.is_primary else _wait_for_cause(folder)
    if cause is not None and cause.rank != rank:
        _print_line(rank, f"rank {rank} stopped because rank {cause.rank} failed")
        return cause.exit_code
    if claim_report(rank, folder):
        print_error(explain(own, read_all(folder), size, folder))
    else:
        _print_line(rank, f"rank {rank} failed too: see {folder}")
    return own.exit_code


def _wait_for_cause(folder: Path) -> Failure | None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (cause := read_cause(folder)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return cause


def _print_line(rank: int, text: str) -> None:
    if rank < _PRINTING_RANKS:
        print_error(text)


def exit_without_handlers(code: int) -> NoReturn:
    """End a rank without Python's exit handlers, as the launcher does with ranks that it forked.

    Otherwise Triton's bindings print pages about leaks while Python shuts down.
    """
    flush_output()
    os._exit(code)
