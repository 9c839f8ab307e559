"""Work dealt out to forked processes, which inherit what they need instead of being sent it.

A worker ends when its pipe does, so none outlives a parent that was killed.
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
    """A worker was killed; what others have finished stands."""


def available() -> int:
    """Return how many processes may compute at once here."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def work_through(
    work: Callable[[int], Result], jobs: Sequence[int], workers: int
) -> Iterator[tuple[int, Result]]:
    """Yield (job, result) for all jobs, in the order in which they are done.

    Args:
        work: what to do; runs in other processes if there are several workers. Its results and
            errors must pickle.
        jobs: numbers to call it with, begun in this order.
        workers: processes; 1 = this one.

    Raises:
        WorkerDiedError: a worker was killed.
        Exception: what `work` raised first; the others are stopped.
    """
    workers = min(workers, len(jobs))
    if workers <= 1:
        yield from ((job, work(job)) for job in jobs)
        return
    crew = _Crew(work, workers)
    try:
        yield from crew.run(jobs)
    finally:
        crew.stop()


class _Crew:
    """The processes, and the ends of their pipes."""

    def __init__(self, work: Callable[[int], Any], size: int) -> None:
        context = multiprocessing.get_context("fork")
        self._processes: dict[Connection, ForkProcess] = {}
        for _ in range(size):
            ours, theirs = context.Pipe()
            inherited = [*self._processes, ours]
            process = context.Process(target=_serve, args=(work, theirs, inherited), daemon=True)
            process.start()
            theirs.close()
            self._processes[ours] = process

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
            with suppress(BrokenPipeError):  # receiving says why
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
                "  do: start again with fewer workers; what is finished is not done again"
            ) from None


def _serve(work: Callable[[int], Any], pipe: Connection, inherited: Sequence[Connection]) -> None:
    """Be a worker. The parent's ends must be closed here, or its death would go unnoticed."""
    for end in inherited:
        end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and stops us
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
