"""Run the work of one rank, and report its failure under srun and torchrun."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from frontier_llm.errors import flush_output, print_error
from frontier_llm.launch import failure

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
        failed = failure.from_exception(rank, error)
        try:
            failure.write(failed, folder)
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
    own = failure.read_rank(rank, folder)
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
    if failure.claim_report(rank, folder):
        print_error(failure.explain(own, failure.read_all(folder), size, folder))
    else:
        _print_line(rank, f"rank {rank} failed too: see {folder}")
    return own.exit_code


def _wait_for_cause(folder: Path) -> failure.Failure | None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (cause := failure.read_cause(folder)) is None and time.monotonic() < deadline:
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
