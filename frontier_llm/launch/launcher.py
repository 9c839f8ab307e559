"""Start the ranks of one machine and wait for them; if one fails, end the others and say why.

If a rank fails, the others get 2 s to end by themselves, then SIGTERM, and after another 5 s
SIGKILL. When every rank has ended, the failure that caused the others is printed.

A run is started again, if wanted, if a rank died, hung, lost contact or failed with an error of the
program. It is not if a message says what the user has to do (a wrong configuration, divergence, a
full disk), or if it was asked to stop. A run that fails again and again without a new step in
between ends after a number of tries.

The parent must not have run multi-threaded torch operations: a fork copies the state of the thread
pool but not its threads, and the child would wait for them forever.
"""

import os
import platform
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm.errors import LaunchError, print_error
from frontier_llm.launch import failure
from frontier_llm.launch.coordination import run_and_wait_for_all
from frontier_llm.launch.forked_ranks import POLL_SECONDS, ForkedRanks
from frontier_llm.launch.rank import run_rank
from frontier_llm.launch.rendezvous import MIN_CONNECTIONS, listen, make_store
from frontier_llm.launch.slurm import STARTED_AGAIN
from frontier_llm.launch.stop import STOP_SIGNALS, ParentSignals, StopFlag
from frontier_llm.launch.world import World

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

PATIENCE_SECONDS = 2.0
"""How long the other ranks may run after one rank failed, before they get SIGTERM."""
TERMINATION_SECONDS = 5.0
INTERRUPTED = 130
"""Exit code after a second Ctrl-C, as in shells."""
Target = Callable[[World, "Store"], None]
"""The work of a rank."""


@dataclass(frozen=True)
class LaunchOptions:
    """How many ranks to start on this machine, and how."""

    ranks: int
    failure_dir: Path
    """Folder for the tracebacks of failing ranks; created when needed."""
    ranks_per_node: int | None = None
    """Consecutive ranks that count as one node; None = all ranks are on one node."""
    port: int | None = None
    """TCP port of the store; None = any free port."""
    threads: int = 1
    """CPU threads per rank."""
    connections: int = MIN_CONNECTIONS
    """Connections of each rank to the store, at most."""
    store_timeout: timedelta = timedelta(seconds=60)
    """How long a rank waits for the store, and for a key in it."""


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    exit_code: int
    """0, or the exit code of the failure that was the cause of the others."""
    cause: failure.Failure | None = None
    """This failure; None if the job is done, or was killed by a second Ctrl-C."""


def launch(target: Target, options: LaunchOptions) -> Ended:
    """Run `target(world, store)` on forked ranks and wait; print the cause of a failure to stderr.

    The first SIGINT, SIGTERM or SIGUSR1 asks all ranks to save and stop; they receive SIGTERM. A
    second SIGINT kills them at once. No rank outlives this call or this process.

    Raises LaunchError if the port is in use, or a process cannot be started.
    """
    failure.clear(options.failure_dir)
    server = listen("127.0.0.1", options.port or 0)
    ranks = ForkedRanks()
    with ParentSignals() as signals:
        try:
            for rank in range(options.ranks):
                world = local_world(rank, options, server.getsockname()[1])
                work = partial(_connect_and_run, world, server, target, options)
                fork_rank(ranks, rank, partial(run_rank, work, rank, options.failure_dir))
            # if the parent kept the socket open, it would accept connections after rank 0 has ended
            server.close()
            killed = not _wait(ranks, signals)
        finally:
            ranks.kill()
    if killed:
        print_error("killed by the second Ctrl-C; steps after the newest checkpoint are lost")
        return Ended(INTERRUPTED)
    died = {
        rank: failure.died(rank, code, seconds)
        for rank, (code, seconds) in ranks.ended.items()
        if code and not ranks.was_ended_by_parent(rank)
    }
    return report_cause(died, options)


def local_world(rank: int, options: LaunchOptions, port: int) -> World:
    """Return the `World` of a rank that a launcher on this machine has forked."""
    return World(
        rank=rank,
        size=options.ranks,
        local_rank=rank,
        ranks_per_node=options.ranks_per_node or options.ranks,
        host=platform.node(),
        launcher="local",
        master_address="127.0.0.1",
        master_port=port,
    )


def fork_rank(ranks: ForkedRanks, number: int, run: Callable[[], int]) -> None:
    """Fork a process that handles stop signals as a rank does, and exits with the code of `run`.

    Raises LaunchError if the process cannot be started.
    """

    def handle_signals_and_run() -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # left to the parent
        StopFlag.install()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return run()

    # A signal that arrives before the child has installed its handler must stay pending.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        ranks.fork(number, handle_signals_and_run)
    except OSError as error:
        raise LaunchError(
            f"rank {number} cannot be started ({error.strerror}): lower launch.ranks"
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _connect_and_run(
    world: World, server: socket.socket, target: Target, options: LaunchOptions
) -> None:
    import torch

    torch.set_num_threads(options.threads)
    descriptor = server.detach()
    if world.rank:
        os.close(descriptor)
    store = make_store(
        world,
        options.store_timeout,
        None if world.rank else descriptor,
        connections=options.connections,
    )
    run_and_wait_for_all(target, world, store)


def _wait(ranks: ForkedRanks, signals: ParentSignals) -> bool:
    """Wait until every rank has ended; return False if a second Ctrl-C came first."""
    stopping, failed_at, terminated = False, None, False
    while ranks.running:
        if signals.second_interrupt:
            return False
        if signals.take_stop() and not stopping:
            stopping = True
            print_error("stopping after the current step (Ctrl-C once more kills at once)")
            ranks.send(signal.SIGTERM)
        ranks.poll()
        if ranks.has_failed():
            now = time.monotonic()
            failed_at = failed_at or now
            if now - failed_at > PATIENCE_SECONDS and not terminated:
                terminated = True
                ranks.send(signal.SIGTERM)
            if now - failed_at > PATIENCE_SECONDS + TERMINATION_SECONDS:
                ranks.kill()
        time.sleep(POLL_SECONDS)
    return True


def report_cause(died: Mapping[int, failure.Failure], options: LaunchOptions) -> Ended:
    """Print the cause of a failure, and return how the job ended.

    `died` has the failures of ranks that ended without writing one.
    """
    written = {failed.rank: failed for failed in failure.read_all(options.failure_dir)}
    failures = {**died, **written}
    if not failures:
        return Ended(0)
    cause = failure.cause(failures.values())
    print_error(failure.explain(cause, failures.values(), options.ranks, options.failure_dir))
    if cause.kind == "stopped":  # then all are, and there is no failure to look at
        with suppress(OSError):
            failure.clear(options.failure_dir)
            options.failure_dir.rmdir()
    return Ended(cause.exit_code, cause)


def launch_with_restarts(
    target: Callable[[int], Target],
    options: LaunchOptions,
    restarts: int,
    steps_done: Callable[[], int],
) -> int:
    """Run the work of the ranks, again after a failure, and return the exit code of the job.

    Args:
        target: returns the work of the ranks for the start with this number, counted from 0.
        options: options of each start.
        restarts: how many times the ranks are started again without a new step in between.
        steps_done: returns the number of steps of which the run has records.
    """
    start, tries, most_steps = 0, 0, steps_done()
    while True:
        ended = launch(target(start), options)
        if not may_have_passed(ended):
            return ended.exit_code
        steps = steps_done()
        tries = 0 if steps > most_steps else tries
        most_steps = max(most_steps, steps)
        if tries >= restarts:
            if restarts:
                times = f"{tries + 1} time(s) without a new step"
                print_error(f"the run failed {times}: it is not started again")
            return ended.exit_code
        start, tries = start + 1, tries + 1
        os.environ[STARTED_AGAIN] = "1"
        print_error(
            f"the run is started again, from its newest checkpoint (try {tries} of {restarts} "
            f"without a new step; launch.restarts)"
        )


def may_have_passed(ended: Ended) -> bool:
    """Whether a job failed for a reason that may be gone when it is started again."""
    return ended.cause is not None and ended.cause.kind not in ("user", "stopped")
