"""The parent of local ranks: it forks them, waits, ends what one failure left, names the cause.

States of a launch:
    running    all is well, or some ranks have ended well
    ending     a rank failed; the others have 2 s to end by themselves, then SIGTERM, 5 s more,
               then SIGKILL
    over       every rank has ended; the cause is shown

The parent must not have run threaded torch operations: a forked thread pool has no threads, and
the child would wait for them for ever.
"""

import ctypes
import gc
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm.errors import LaunchError
from frontier_llm.parallel import failure
from frontier_llm.parallel.agreement import run_and_leave
from frontier_llm.parallel.children import POLL_SECONDS, Children
from frontier_llm.parallel.rank import run_rank
from frontier_llm.parallel.stop import REQUESTS, Requests, StopFlag
from frontier_llm.parallel.world import World, listen, make_store

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

PATIENCE_SECONDS = 2.0
"""For the others to end by themselves after one rank failed."""
TERMINATION_SECONDS = 5.0
"""Between SIGTERM and SIGKILL."""
INTERRUPTED = 130
"""Exit code after a second Ctrl-C, as shells have it."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Launch:
    """What to start on this machine."""

    ranks: int
    """Processes."""
    failure_dir: Path
    """Where a failing rank leaves its traceback; made when needed."""
    ranks_per_node: int | None = None
    """Where a node ends; None = all are on one."""
    port: int | None = None
    """Of the store; None = any free one."""
    threads: int = 1
    """CPU threads a rank."""
    store_timeout: timedelta = timedelta(seconds=60)
    """How long a rank waits for the store, and for a key in it."""


def launch(target: Callable[[World, "Store"], None], what: Launch) -> int:
    """Run `target(world, store)` on forked ranks and return the exit code of the job.

    SIGINT, SIGTERM and SIGUSR1 are handed on to the ranks once, as SIGTERM: a request to stop in
    order. A second SIGINT kills at once. No rank outlives this call, nor this process.

    Args:
        target: the work of a rank; what it raises ends the job.
        what: how many ranks, and where they meet.

    Returns:
        0, or the exit code of the failure that was the cause, which is printed to stderr.

    Raises:
        LaunchError: the port is taken.
    """
    failure.clear(what.failure_dir)
    server = listen("127.0.0.1", what.port or 0)
    ranks = Children()
    with Requests() as requests:
        try:
            for rank in range(what.ranks):
                world = _world(rank, what, server.getsockname()[1])
                ranks.running[rank] = _fork(world, server, target, what)
            server.close()  # else the port would outlive rank 0, and its peers would wait in vain
            killed = not _wait(ranks, requests)
        finally:
            ranks.kill()
    if killed:
        _say("killed by the second Ctrl-C; nothing was saved")
        return INTERRUPTED
    return _conclude(ranks, what)


def _world(rank: int, what: Launch, port: int) -> World:
    return World(
        rank=rank,
        size=what.ranks,
        local_rank=rank,
        ranks_per_node=what.ranks_per_node or what.ranks,
        host=platform.node(),
        launcher="local",
        master_address="127.0.0.1",
        master_port=port,
    )


def _fork(
    world: World, server: socket.socket, target: Callable[[World, "Store"], None], what: Launch
) -> int:
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    # A request that comes before the child has its own handler must wait, not vanish.
    signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    try:
        pid = os.fork()
    except OSError as error:
        raise LaunchError(
            f"rank {world.rank} of {world.size} cannot be started ({error.strerror}): lower "
            "launch.ranks"
        ) from None
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)
        return pid
    gc.freeze()  # a collection would write to, and so copy, every page that is the parent's
    code = 1
    try:
        _die_with(parent)
        _listen_for_requests()
        code = run_rank(
            lambda: _meet_and_run(world, server, target, what), world.rank, what.failure_dir
        )
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # not the parent's exit handlers


def _meet_and_run(
    world: World, server: socket.socket, target: Callable[[World, "Store"], None], what: Launch
) -> None:
    import torch

    torch.set_num_threads(what.threads)
    descriptor = server.detach()
    if world.rank:
        os.close(descriptor)
    store = make_store(world, what.store_timeout, None if world.rank else descriptor)
    run_and_leave(target, world, store)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _listen_for_requests() -> None:
    """Take over from the parent's handlers; a terminal's Ctrl-C is for the parent alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    StopFlag.install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)


def _wait(ranks: Children, requests: Requests) -> bool:
    """Wait until every rank has ended; False if a second Ctrl-C came first."""
    asked, failed_at, terminated = False, None, False
    while ranks.running:
        if requests.is_impatient:
            return False
        if requests.take_stop() and not asked:
            asked = True
            _say("stopping in order (Ctrl-C once more kills at once)")
            ranks.send(signal.SIGTERM)
        ranks.poll()
        if ranks.failed():
            now = time.monotonic()
            failed_at = failed_at or now
            if now - failed_at > PATIENCE_SECONDS and not terminated:
                terminated = True
                ranks.send(signal.SIGTERM)
            if now - failed_at > PATIENCE_SECONDS + TERMINATION_SECONDS:
                ranks.kill()
        time.sleep(POLL_SECONDS)
    return True


def _conclude(ranks: Children, what: Launch) -> int:
    """Name the cause, last of all that is printed."""
    found = {failed.rank: failed for failed in failure.read_all(what.failure_dir)}
    for rank, (code, seconds) in ranks.ended.items():
        if code and rank not in found and not ranks.died_of_ours(rank):
            found[rank] = failure.died(rank, code, seconds)
    if not found:
        return 0
    chosen = failure.cause(found.values())
    _say(failure.explain(chosen, found.values(), what.ranks, what.failure_dir))
    return chosen.exit_code


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
