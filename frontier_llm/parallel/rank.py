"""What surrounds the work of one rank: its failure becomes a file and an exit code."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from frontier_llm.parallel import failure

_PATIENCE_SECONDS = 2.0
_POLL_SECONDS = 0.25
_SPEAKERS = 16
"""Ranks that point at the cause: thousands of such lines would hide it."""


def run_rank(work: Callable[[], None], rank: int, folder: Path) -> int:
    """Do a rank's work; return its exit code, leave `rank_N.json` if it failed. Prints nothing.

    Args:
        work: what this rank does.
        rank: its number.
        folder: where failures lie.
    """
    try:
        work()
    except BaseException as error:
        failed = failure.describe(rank, error)
        try:
            failure.write(failed, folder)
        except OSError as trouble:  # the disk may be the very thing that failed
            sys.stderr.write(f"[rank {rank}] {failed.message}\n(not written: {trouble})\n")
        return failed.exit_code
    return 0


def report(rank: int, size: int, folder: Path, code: int) -> int:
    """Say why this rank failed where no parent of ours does (srun, torchrun); return the code.

    The rank that was the cause says it in full; one that lost its peer waits a moment for that
    peer's word and then says one line. All ranks come here at once, on a file system that they
    share: each reads its own file and that of the cause, and one at most reads all.
    """
    own = failure.of_rank(rank, folder)
    if own is None:
        return code  # it could not be written, and was said
    if own.kind == "stopped":
        _say(own.message if rank == 0 else "")
        return own.exit_code
    first = own if own.is_primary else _await_cause(folder)
    if first is not None and first.rank != rank:
        _say(f"rank {rank} stopped because rank {first.rank} failed" if rank < _SPEAKERS else "")
        return first.exit_code
    if failure.claim_first(rank, folder):
        _say(failure.explain(own, failure.read_all(folder), size, folder))
    else:
        _say(f"rank {rank} failed too: see {folder}" if rank < _SPEAKERS else "")
    return own.exit_code


def _await_cause(folder: Path) -> failure.Failure | None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (found := failure.known_cause(folder)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return found


def _say(text: str) -> None:
    if text:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
