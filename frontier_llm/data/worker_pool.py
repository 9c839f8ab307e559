"""Run jobs in forked worker processes.

Forked processes inherit all inputs from the parent, so only the number of a job is sent to them. A
worker exits when its pipe is closed, so no worker survives a parent that was killed.
"""

import gc
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

from frontier_llm.errors import DataError

Result = TypeVar("Result")
_ENDING = {signal.SIGINT, signal.SIGTERM}


class WorkerDiedError(DataError):
    """Raised if a worker process was killed. The results of finished jobs remain valid."""


def run_jobs(
    work: Callable[[int], Result], jobs: Sequence[int], workers: int
) -> Iterator[tuple[int, Result]]:
    """Call `work` for all jobs and yield (job, result) in the order of completion.

    If there are several workers, they are other processes, and results and exceptions must be
    picklable. The first exception of `work` is raised, and the other workers are stopped. Raises a
    WorkerDiedError if a worker process was killed.
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
    """Starts worker processes and sends them jobs. Each worker has a pipe to the parent."""

    def __init__(self, work: Callable[[int], Any], size: int) -> None:
        context = multiprocessing.get_context("fork")
        self._processes: dict[Connection, ForkProcess] = {}
        # Python drops an exception of a signal's handler that arrives while it forks
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        for _ in range(size):
            parent_end, worker_end = context.Pipe()
            inherited = [*self._processes, parent_end]
            process = context.Process(
                target=_serve, args=(work, worker_end, inherited), daemon=True
            )
            process.start()
            worker_end.close()
            self._processes[parent_end] = process
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)

    def run(self, jobs: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Yield (job, result) in the order of completion."""
        waiting_jobs = iter(jobs)
        busy = [pipe for pipe in self._processes if self._send_next(pipe, waiting_jobs)]
        while busy:
            for pipe in wait(busy):
                assert isinstance(pipe, Connection)
                job, result, error = self._receive(pipe)
                if error is not None:
                    raise error
                yield job, result
                if not self._send_next(pipe, waiting_jobs):
                    busy.remove(pipe)

    def stop(self) -> None:
        """Terminate all workers."""
        for pipe, process in self._processes.items():
            pipe.close()
            process.terminate()
            process.join()

    def _send_next(self, pipe: Connection, waiting_jobs: Iterator[int]) -> bool:
        """Send the next waiting job to a worker; return False if there is none."""
        job = next(waiting_jobs, None)
        if job is not None:
            with suppress(BrokenPipeError):  # the worker died; `_receive` will raise the reason
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
    """Run jobs from a pipe until the parent closes the pipe.

    The fork made copies of the parent's ends of pipes. They are closed first, because otherwise the
    pipes would stay open after the parent's death.
    """
    gc.freeze()  # what the parent left as garbage may own threads, which a fork does not copy
    for parent_end in inherited:
        parent_end.close()
    # Ctrl-C reaches the parent as well, which then stops the workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    with suppress(EOFError, ConnectionError):
        while True:
            job = pipe.recv()
            answer: tuple[int, Any, Exception | None]
            try:
                answer = (job, work(job), None)
            except Exception as error:
                answer = (job, None, error)
            pipe.send(answer)
