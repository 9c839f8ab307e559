"""What surrounds the work of one rank: its failure becomes a file and an exit code."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from frontier_llm.parallel import failure

_PATIENCE_SECONDS = 2.0


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
    peer's word and then says one line.
    """
    own = next((found for found in failure.read_all(folder) if found.rank == rank), None)
    if own is None:
        return code  # it could not be written, and was said
    if own.kind == "stopped":
        _say(own.message if rank == 0 else "")
        return own.exit_code
    first = own if own.is_primary else _await_primary(folder)
    if first is not None and first.rank != rank:
        _say(f"rank {rank} stopped because rank {first.rank} failed")
        return first.exit_code
    if failure.claim_first(rank, folder):
        _say(failure.explain(own, failure.read_all(folder), size, folder))
    else:
        _say(f"rank {rank} failed too: see {folder}")
    return own.exit_code


def _await_primary(folder: Path) -> failure.Failure | None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        found = [failed for failed in failure.read_all(folder) if failed.is_primary]
        if found:
            return failure.cause(found)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)


def _say(text: str) -> None:
    if text:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
