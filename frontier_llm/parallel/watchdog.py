"""Ends a run that stands still or has lost a rank, and says which rank is at fault.

A thread of each rank looks at the clock of its main thread's phase. States of a rank:

    watching   within its limit
    alarmed    it exceeded the limit, or lost contact with a rank that left no word, or another
               rank rang its bell: it tells the store where it stands. The first to do so judges:
               it rings all bells, waits a moment for the others' words, and writes the verdict
    over       the verdict is there, or the store does not answer: the process ends, exit code 1

The main thread may hang anywhere, so the end is `os._exit`: nothing of it can be waited for. Until
a stall a rank asks the store twice in all: for its bell, and to silence it.
"""

import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING

from frontier_llm.config.watchdog import WatchdogConfig
from frontier_llm.parallel import failure
from frontier_llm.parallel.stall import Phase, RankState, explain, explain_loss, page
from frontier_llm.parallel.world import World

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

STALL_FILE = "stall.txt"
COLLECT_SECONDS = 8.0
"""How long the judge of a stall waits for the words of ranks that may be dead."""
ROLL_CALL_SECONDS = 3.0
"""The same after a loss: Slurm ends a job's other tasks within its KillWait, 30 s by default."""
VERDICT_SECONDS = 20.0
"""How long a rank waits for the verdict before it takes rank 0, who holds the store, for lost."""
HEARING_SECONDS = 3.0
"""How long rank 0 keeps the store for ranks that have not read the verdict."""
_POLL_SECONDS = 0.5
_EAR_SECONDS = 10.0
_STEPS_KNOWN = 3
"""Before that many steps have been measured, each has the limit of a first one."""
_LONG = timedelta(days=20)
"""The store counts milliseconds in 31 bits."""


class Watchdog:
    """Watches the main thread of one rank; `phase` tells it what that thread is doing."""

    def __init__(
        self, config: WatchdogConfig, world: World, store: "Store", run_dir: Path, failures: Path
    ) -> None:
        """Prepare; `with` starts and ends the watch.

        Args:
            config: the limits.
            world: this rank's place.
            store: where the ranks met.
            run_dir: where the state of all ranks is written when they stall.
            failures: where this rank's end is explained.
        """
        self._config, self._world, self._store = config, world, store
        self._run_dir, self._failures = run_dir, failures
        self._phase = Phase("startup", 0, time.monotonic(), config.startup_seconds)
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._alarm, self._closed = threading.Event(), threading.Event()
        self._failed_in: Phase | None = None
        """The phase that an error has just left."""
        self._lost: BaseException | None = None
        """What the main thread met when it lost contact with another rank."""
        self._ear: threading.Thread | None = None
        self._eye: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        if self._config.enabled:
            self._ear = threading.Thread(target=self._listen, name="watchdog ear", daemon=True)
            self._eye = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._ear.start()
            self._eye.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._world.launcher != "local":  # there the parent knows
            self._account_for(error)
        self._closed.set()
        if self._ear is not None:
            try:
                self._store.set(self._bell(self._world.rank), "closed")
            except RuntimeError:
                return  # the store is gone, and with it what the ear listens to
            self._ear.join(_EAR_SECONDS)

    @contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        """Say what the main thread does; inside another phase, that one's clock stands still.

        Args:
            name: `groups`, `step`, `checkpoint`, `evaluation` or another word for messages, which
                has the limit of the start-up.
            step: the step that begins; None: the same as before.
        """
        outer = self._phase
        at = outer.step if step is None else step
        inner = Phase(name, at, time.monotonic(), self._limit(name))
        self._phase, self._failed_in = inner, None
        try:
            yield
        except BaseException:
            self._failed_in = self._failed_in or inner
            raise
        finally:
            now = time.monotonic()
            if name == "step":
                self._step_seconds.append(now - self._phase.started)  # without phases inside it
            started = outer.started + now - inner.started
            self._phase = Phase(outer.name, at, started, outer.limit_seconds)

    def _account_for(self, error: BaseException) -> None:
        """Tell the others that this rank says why it ends; after a lost contact, call the roll.

        Returns if some rank says why the run ends, or if rank 0 is gone and the store with it;
        else the roll's verdict ends the process.
        """
        if self._eye is None:
            return
        try:
            if not failure.is_lost_contact(error):
                self._store.set(self._key("speaks"), str(self._world.rank))
                return
            if self._store.check([self._key("speaks")]):
                return
        except RuntimeError:
            return
        self._lost = error
        self._alarm.set()
        self._eye.join()

    def _limit(self, name: str) -> float:
        config = self._config
        if name == "step":
            if len(self._step_seconds) < _STEPS_KNOWN:
                return config.first_step_seconds
            return max(config.step_seconds, config.step_factor * median(self._step_seconds))
        limits = {
            "checkpoint": config.checkpoint_seconds,
            "evaluation": config.evaluation_seconds,
        }
        return limits.get(name, config.startup_seconds)

    def _watch(self) -> None:
        """Look at the clock until the watch ends; the body of a thread."""
        while not self._closed.wait(_POLL_SECONDS):
            phase = self._phase
            if self._alarm.is_set() or time.monotonic() - phase.started > phase.limit_seconds:
                self._end((self._failed_in or phase) if self._lost else phase)

    def _listen(self) -> None:
        """Wait for this rank's bell; the body of a thread with a connection of its own."""
        bell = self._bell(self._world.rank)
        try:
            store: Store = self._store.clone()  # type: ignore[attr-defined]
            while not _is_rung(store, bell):
                pass
        except RuntimeError:
            return  # rank 0 is gone: the next collective says so, or the clock
        if not self._closed.is_set():
            self._alarm.set()

    def _end(self, phase: Phase) -> None:
        """Tell where this rank stands, wait for the verdict, and end the process."""
        verdict: list[str] = []
        messenger = threading.Thread(target=self._confer, args=(phase, verdict), daemon=True)
        messenger.start()
        messenger.join(VERDICT_SECONDS)
        if self._closed.is_set():
            return  # the main thread woke up and ended meanwhile
        if not verdict:
            verdict = [self._without_store(phase)]
            self._leave_word("user", verdict[0])
            self._say(verdict[0])
        sys.stderr.flush()
        os._exit(1)

    def _confer(self, phase: Phase, verdict: list[str]) -> None:
        """Tell the store where this rank stands, and get or make the verdict.

        The body of a thread: NCCL's trace of collectives may hang with the device, the end not.
        """
        state = RankState.now(self._world, phase, self._lost)
        try:
            store: Store = self._store.clone()  # type: ignore[attr-defined]
            store.set(self._key(f"state/{state.rank}"), state.to_json())
            if store.add(self._key("stalled"), 1) == 1:
                text = self._judge(store, phase)
            else:
                store.wait([self._key("verdict")], timedelta(seconds=VERDICT_SECONDS))
                text = store.get(self._key("verdict")).decode()
                self._leave_word("echo", text)
            self._hear(store)
        except RuntimeError:
            return
        verdict.append(text)

    def _hear(self, store: "Store") -> None:
        """Say that this rank knows the verdict; rank 0 keeps the store until all do."""
        heard = store.add(self._key("heard"), 1)
        deadline = time.monotonic() + HEARING_SECONDS
        while self._world.rank == 0 and time.monotonic() < deadline:
            if heard == store.add(self._key("stalled"), 0):
                break
            time.sleep(0.05)
            heard = store.add(self._key("heard"), 0)

    def _judge(self, store: "Store", phase: Phase) -> str:
        """Hear all ranks, choose those at fault, write the verdict."""
        for rank in range(self._world.size):
            store.set(self._bell(rank), "alarm")
        deadline = time.monotonic() + (ROLL_CALL_SECONDS if self._lost else COLLECT_SECONDS)
        while time.monotonic() < deadline:
            if store.add(self._key("stalled"), 0) == self._world.size:
                break
            time.sleep(0.1)
        states = self._states(store)
        file = self._run_dir / STALL_FILE
        if self._lost:
            text = explain_loss(states, self._world, _words(self._lost), str(file))
        else:
            text = explain(states, self._world, phase, str(file))
        try:
            file.write_text(f"{text}\n\n{page(states, self._world.size)}")
        except OSError as error:
            text += f" (not written: {error.strerror})"
        self._leave_word("user", text)
        self._say(text)
        store.set(self._key("verdict"), text)
        return text

    def _states(self, store: "Store") -> dict[int, RankState]:
        found = {}
        for rank in range(self._world.size):
            key = self._key(f"state/{rank}")
            if store.check([key]):
                found[rank] = RankState.from_json(store.get(key))
        return found

    def _without_store(self, phase: Phase) -> str:
        world = self._world
        return (
            f"stall: rank {world.rank} ({world.host}) does not get on in {phase.name} of step "
            f"{phase.step} (limit: {phase.limit_seconds:.0f} s), and the store of "
            f"{world.name_ranks([0])} at {world.master_address} does not answer: rank 0 is stopped "
            "or dead, or this host is cut off from the network"
        )

    def _leave_word(self, kind: failure.Kind, text: str) -> None:
        word = failure.Failure(self._world.rank, time.time(), kind, "Watchdog", text, "", 1)
        try:
            failure.write(word, self._failures)
        except OSError as error:
            sys.stderr.write(f"[rank {self._world.rank}] failure not written: {error}\n")

    def _say(self, text: str) -> None:
        if self._world.launcher != "local":  # there the parent says it
            sys.stderr.write(text + "\n")

    def _bell(self, rank: int) -> str:
        return self._key(f"bell/{rank}")

    def _key(self, name: str) -> str:
        return f"watchdog/{name}"


def _is_rung(store: "Store", bell: str) -> bool:
    """Wait for a bell, as long as the store can.

    Raises:
        RuntimeError: the store does not answer.
    """
    try:
        store.wait([bell], _LONG)
    except RuntimeError:  # also when the time is over
        return bool(store.check([bell]))
    return True


def _words(error: BaseException) -> str:
    """Return the first sentence of gloo's or nccl's error, without the place in its source."""
    first = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[[^\]]*\] ", "", first).split(". This is")[0]
