"""Run jobs in forked worker processes, which inherit their inputs from the parent.

A worker exits when its pipe is closed, so no worker outlives a parent that was killed.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

from frontier_llm.errors import DataError

Result = TypeVar("Result")


class WorkerDiedError(DataError):
    """A worker process was killed. Jobs that were finished before remain valid."""


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_jobs(
    work: Callable[[int], Result], jobs: Sequence[int], workers: int
) -> Iterator[tuple[int, Result]]:
    """Call `work` for all jobs and yield (job, result) in the order of completion.

    Args:
        work: function to call; runs in other processes if there are several workers. Its results
            and exceptions must be picklable.
        jobs: arguments of the calls, started in this order.
        workers: number of processes; 1: this process.

    Raises:
        WorkerDiedError: a worker process was killed.
        Exception: the first exception that `work` raised; the other workers are stopped.
    """
    workers = min(workers, len(jobs))
    if workers <= 1:
        yield from ((job, work(job)) for job in jobs)
        return
    pool = _WorkerPool(work, workers)
    try:
        yield from pool.run(jobs)
    finally:
        pool.stop()


class _WorkerPool:
    """Forked worker processes and the parent's ends of their pipes."""

    def __init__(self, work: Callable[[int], Any], size: int) -> None:
        context = multiprocessing.get_context("fork")
        self._processes: dict[Connection, ForkProcess] = {}
        for _ in range(size):
            parent_end, worker_end = context.Pipe()
            inherited = [*self._processes, parent_end]
            process = context.Process(
                target=_serve, args=(work, worker_end, inherited), daemon=True
            )
            process.start()
            worker_end.close()
            self._processes[parent_end] = process

    def run(self, jobs: Sequence[int]) -> Iterator[tuple[int, Any]]:
        waiting = iter(jobs)
        busy = [pipe for pipe in self._processes if self._give(pipe, waiting)]
        while busy:
            for pipe in wait(busy):
                assert isinstance(pipe, Connection)
                job, result, error = self._receive(pipe)
                if error is not None:
                    raise error
                yield job, result
                if not self._give(pipe, waiting):
                    busy.remove(pipe)

    def stop(self) -> None:
        for pipe, process in self._processes.items():
            pipe.close()
            process.terminate()
            process.join()

    def _give(self, pipe: Connection, waiting: Iterator[int]) -> bool:
        job = next(waiting, None)
        if job is not None:
            with suppress(BrokenPipeError):  # `_receive` raises the reason
                pipe.send(job)
        return job is not None

    def _receive(self, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except (EOFError, ConnectionError):
            process = self._processes[pipe]
            process.join()
            raise WorkerDiedError(
                f"a worker process was killed (exit code {process.exitcode}): out of memory?\n"
                "  do: start again with fewer workers; finished work is not repeated"
            ) from None


def _serve(work: Callable[[int], Any], pipe: Connection, inherited: Sequence[Connection]) -> None:
    """Run jobs from a pipe until it is closed.

    The parent's ends of all pipes, which this process inherited, are closed first: otherwise the
    pipe would stay open after the parent's death.
    """
    for end in inherited:
        end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and stops the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(EOFError, ConnectionError):
        while True:
            job = pipe.recv()
            answer: tuple[int, Any, Exception | None]
            try:
                answer = (job, work(job), None)
            except Exception as error:
                answer = (job, None, error)
            pipe.send(answer)
