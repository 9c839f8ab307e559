"""Two threads on each rank that end a hanging run and name the rank at fault.

The main thread tells the watchdog in which phase it is, such as a step or a checkpoint. Each phase
has a time limit, which the monitor thread checks. The listener thread waits for the alarm of
another rank. A rank is in one of these states:

- watching: the phase is within its limit.
- alarmed: the phase has exceeded its limit; or the rank has lost contact with another rank that
  reported no failure; or another rank has raised the alarm. The rank writes what it is doing into
  the store, torch's key-value store on rank 0. The first alarmed rank coordinates: it raises the
  alarm on all ranks, waits a few seconds for their states, and publishes the diagnosis.
- over: the diagnosis is published, or the store does not answer. The process exits with code 1.

The main thread may hang anywhere, so the process ends by `os._exit`. Without an alarm, a rank
accesses the store only twice per run: once to wait for an alarm, and once to end this wait.
"""

import logging
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

from torch.distributed import Store

from frontier_llm.config.watchdog import WatchdogConfig
from frontier_llm.health import alarm
from frontier_llm.health.diagnosis import (
    Phase,
    RankState,
    explain_loss,
    explain_lost_store,
    explain_stall,
    format_states,
    late_ranks,
)
from frontier_llm.launch import failure
from frontier_llm.launch.world import World
from frontier_llm.membership.roster_store import LateRanks

STALL_FILE = "stall.txt"
"""File in the run directory that receives the diagnosis and the states of all ranks."""
STALL_REPORT_SECONDS = 8.0
"""How long the coordinator waits for the states of all ranks after a stall. A dead rank sends
none."""
LOSS_REPORT_SECONDS = 3.0
"""The same after a loss of contact. It is shorter, because Slurm kills the other ranks 30 s (its
KillWait) after one rank has ended."""
DIAGNOSIS_SECONDS = 20.0
"""A rank that waits longer for the diagnosis concludes that rank 0 and its store are lost."""
ACKNOWLEDGE_SECONDS = 3.0
"""How long rank 0 keeps its store alive for ranks that have not read the diagnosis yet."""
_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.5
_LISTENER_END_SECONDS = 10.0
"""How long a rank that ends waits for its listener thread."""
_MEASURED_STEPS = 3
"""Until this many steps have been measured, each step has the time limit of a first step."""


@dataclass(frozen=True)
class Limits:
    """Time limits of phases, with the meaning that they have in the configuration of a run."""

    startup_seconds: float
    first_step_seconds: float
    step_seconds: float
    checkpoint_seconds: float
    evaluation_seconds: float
    step_factor: float = 10.0
    enabled: bool = True


def limit_of(name: str, limits: Limits | WatchdogConfig, step_seconds: Collection[float]) -> float:
    """Return the time limit of a phase in seconds.

    Phases other than `step`, `checkpoint` and `evaluation` have the limit of the start-up.
    """
    if name == "step":
        if len(step_seconds) < _MEASURED_STEPS:
            return limits.first_step_seconds
        return max(limits.step_seconds, limits.step_factor * median(step_seconds))
    of_phases = {"checkpoint": limits.checkpoint_seconds, "evaluation": limits.evaluation_seconds}
    return of_phases.get(name, limits.startup_seconds)


class Watchdog:
    """Watches the main thread of one rank, which announces what it does by `phase`.

    Entering the context starts the threads. If ranks can be replaced, `report_late` tells the
    coordinator of the job which are at fault (Membership.report_late), and the process does not end
    after an alarm. The states of all ranks are written to `run_dir`, this rank's failure to
    `failures`.
    """

    def __init__(
        self,
        limits: Limits | WatchdogConfig,
        world: World,
        store: Store,
        run_dir: Path,
        failures: Path,
        report_late: Callable[[LateRanks], None] | None = None,
    ) -> None:
        self.report_late = report_late
        self._limits, self._world, self._store = limits, world, store
        self._run_dir, self._failures = run_dir, failures
        self._phase = Phase("startup", 0, time.monotonic(), limits.startup_seconds)
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._alarmed, self._closed = threading.Event(), threading.Event()
        self._failed_phase: Phase | None = None
        """The innermost phase in which the main thread raised an exception."""
        self._contact_error: BaseException | None = None
        """The error by which the main thread noticed that it lost contact with another rank."""
        self._listener: threading.Thread | None = None
        self._monitor: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        if self._limits.enabled:
            self._listener = threading.Thread(
                target=self._listen, name="watchdog listener", daemon=True
            )
            self._monitor = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._listener.start()
            self._monitor.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # a local launcher sees which rank has ended first, so it does not need the watchdog
        if error is not None and self._world.launcher != "local" and not self.report_late:
            self._handle_failure(error)
        self._closed.set()
        if self._listener is not None:
            try:
                alarm.close(self._store, self._world.rank)
            except RuntimeError:
                return  # the store is gone, so the listener has ended
            self._listener.join(_LISTENER_END_SECONDS)

    @contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        """Announce what the main thread does inside this context; `step` is that which starts.

        The clock of an enclosing phase is paused meanwhile. `step`, `checkpoint` and `evaluation`
        have time limits of their own. Any other name has that of the start-up, and is only shown in
        messages.
        """
        outer = self._phase
        inner_step = outer.step if step is None else step
        inner = Phase(
            name, inner_step, time.monotonic(), limit_of(name, self._limits, self._step_seconds)
        )
        self._phase, self._failed_phase = inner, None
        try:
            yield
        except BaseException:
            self._failed_phase = self._failed_phase or inner
            raise
        finally:
            now = time.monotonic()
            if name == "step":
                # phases inside this one have moved its start, so the median excludes their time
                self._step_seconds.append(now - self._phase.started)
            started = outer.started + now - inner.started
            self._phase = Phase(outer.name, inner_step, started, outer.limit_seconds)

    def _handle_failure(self, error: BaseException) -> None:
        """Handle an error that ends the main thread.

        A loss of contact means that another rank has ended. If no rank has announced the cause,
        this raises the alarm, and the monitor ends the process after the diagnosis. Any other error
        is itself the cause. This rank then announces that it will report a failure.

        Returns if some rank has announced the cause, or if the store on rank 0 does not answer.
        """
        if self._monitor is None:
            return
        try:
            if not failure.is_lost_contact(error):
                self._store.set(alarm.key("reporter"), str(self._world.rank))
                return
            if self._store.check([alarm.key("reporter")]):
                return
        except RuntimeError:
            return
        self._contact_error = error
        self._alarmed.set()
        self._monitor.join()

    def _watch(self) -> None:
        """Compare the phase with its limit until the watch ends; runs in the monitor thread."""
        while not self._closed.wait(_POLL_SECONDS):
            phase = self._phase
            is_late = time.monotonic() - phase.started > phase.limit_seconds
            if self._alarmed.is_set() or (is_late and not self._is_last(phase)):
                if self.report_late is not None:
                    self._get_diagnosis(phase, [])
                    return
                self._end((self._failed_phase or phase) if self._contact_error else phase)

    def _is_last(self, phase: Phase) -> bool:
        """Return whether this is rank 0 at its end, and the other ranks have ended.

        It then waits for the archive, and no rank waits for it.
        """
        if self._world.rank or phase.name != "closing":
            return False
        try:
            store: Store = self._store.clone()  # type: ignore[attr-defined]
            return alarm.only_first_is_left(store, self._world.size)
        except RuntimeError:
            return False

    def _listen(self) -> None:
        """Wait for the alarm of another rank; runs in the listener thread."""
        try:
            store: Store = self._store.clone()  # type: ignore[attr-defined]
            alarm.wait_for_alarm(store, self._world.rank)
            while not self._closed.is_set() and not store.add(alarm.key("alarmed"), 0):
                # a rank counts itself before it raises the alarm, so no rank has raised this one
                alarm.withdraw(store, self._world.rank)
                _LOG.warning(
                    "an alarm that no rank has raised is ignored: another program writes to the "
                    "key-value store of this run"
                )
                alarm.wait_for_alarm(store, self._world.rank)
        except RuntimeError:
            return  # rank 0 is gone: the next collective fails, or the phase exceeds its limit
        if not self._closed.is_set():
            self._alarmed.set()

    def _end(self, phase: Phase) -> None:
        diagnosis: list[str] = []
        messenger = threading.Thread(
            target=self._get_diagnosis, args=(phase, diagnosis), daemon=True
        )
        messenger.start()
        messenger.join(DIAGNOSIS_SECONDS)
        if self._closed.is_set():
            return  # the main thread has resumed and completed in the meantime
        if not diagnosis:
            lost = self._contact_error
            error = None if lost is None else _first_sentence(lost)
            diagnosis = [explain_lost_store(self._world, phase, error)]
            self._write_failure("watchdog", diagnosis[0])
            self._print_error(diagnosis[0])
        sys.stderr.flush()
        os._exit(1)

    def _get_diagnosis(self, phase: Phase, diagnosis: list[str]) -> None:
        """Put this rank's state into the store, and append the diagnosis to a list if it answers.

        Runs in a thread of its own: reading NCCL's trace may hang together with the GPU, and the
        process must end nevertheless.
        """
        state = RankState.now(self._world, phase, self._contact_error)
        try:
            store: Store = self._store.clone()  # type: ignore[attr-defined]
            store.set(alarm.key(f"state/{state.rank}"), state.to_json())
            if store.add(alarm.key("alarmed"), 1) == 1:
                text = self._coordinate(store, phase)
            else:
                store.wait([alarm.key("diagnosis")], timedelta(seconds=DIAGNOSIS_SECONDS))
                text = store.get(alarm.key("diagnosis")).decode()
                if self.report_late is None:
                    self._write_failure("lost_contact", text)
            self._acknowledge(store)
        except RuntimeError:
            return
        diagnosis.append(text)

    def _acknowledge(self, store: Store) -> None:
        """Count this rank as informed. Rank 0 waits until all alarmed ranks are informed."""
        count = store.add(alarm.key("acknowledged"), 1)
        deadline = time.monotonic() + ACKNOWLEDGE_SECONDS
        while self._world.rank == 0 and time.monotonic() < deadline:
            if count == store.add(alarm.key("alarmed"), 0):
                break
            time.sleep(0.05)
            count = store.add(alarm.key("acknowledged"), 0)

    def _coordinate(self, store: Store, phase: Phase) -> str:
        """Raise the alarm on all ranks, collect their states, and publish the diagnosis."""
        alarm.raise_alarm(store, self._world.size)
        is_short = self._contact_error or self.report_late
        deadline = time.monotonic() + (LOSS_REPORT_SECONDS if is_short else STALL_REPORT_SECONDS)
        while time.monotonic() < deadline:
            if store.add(alarm.key("alarmed"), 0) == self._world.size:
                break
            time.sleep(0.1)
        states = alarm.read_states(store, self._world.size)
        closed = alarm.closed_ranks(store, self._world.size) - set(states)
        file = self._run_dir / STALL_FILE
        if self._contact_error:
            text = explain_loss(
                states, self._world, _first_sentence(self._contact_error), str(file), closed
            )
        else:
            text = explain_stall(states, self._world, phase, str(file), closed)
        try:
            file.write_text(f"{text}\n\n{format_states(states, self._world.size)}")
        except OSError as error:
            text += f" (not written: {error.strerror})"
        if self.report_late is not None:
            self.report_late(LateRanks(late_ranks(states, self._world.size, closed), text))
        else:
            self._write_failure("watchdog", text)
            self._print_error(text)
        store.set(alarm.key("diagnosis"), text)
        return text

    def _write_failure(self, kind: failure.Kind, text: str) -> None:
        """Write this rank's failure to its file, which the launcher reads.

        The launcher prints the kind `watchdog`; a rank that only reports the diagnosis of another
        rank has `lost_contact`.
        """
        failed = failure.Failure(self._world.rank, time.time(), kind, "Watchdog", text, "", 1)
        try:
            failure.write(failed, self._failures)
        except OSError as error:
            sys.stderr.write(f"[rank {self._world.rank}] failure not written: {error}\n")

    def _print_error(self, text: str) -> None:
        if self._world.launcher != "local":  # a local launcher prints the failure
            sys.stderr.write(text + "\n")


def _first_sentence(error: BaseException) -> str:
    """Return the first sentence of an error of gloo or nccl, without file and line number."""
    first = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[[^\]]*\] ", "", first).split(". This is")[0]
