"""The driver's side of the workers: one process for each library, started when first needed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from frontier_llm.errors import TrainingError
from tools.bench.contenders import Worker
from tools.bench.turn import RankFigures, Turn, figures_from

ROOT = Path(__file__).resolve().parents[2]


class TurnFailedError(TrainingError):
    """A contender did not get through its turn."""


class Workers:
    """Processes that fork ranks. Leaving the context kills them and the ranks of any turn."""

    def __init__(self, log: Path, pythons: Mapping[Worker, Path]) -> None:
        """Start none yet.

        Args:
            log: receives what libraries print. Its folder also takes the turns' files.
            pythons: interpreters of workers that need another environment than this one.
        """
        self._log, self._pythons = log, pythons
        self._processes: dict[Worker, subprocess.Popen[str]] = {}

    def __enter__(self) -> "Workers":
        self._file: TextIO = self._log.open("a")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            self._end(process)
        self._file.close()

    def run(self, worker: Worker, turn: Turn) -> list[RankFigures]:
        """Have a worker take a turn; return the figures of its ranks.

        Raises:
            TurnFailedError: with the first rank's traceback.
        """
        process = self._process(worker)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(turn.to_json() + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._end(self._processes.pop(worker))
            raise TurnFailedError(f"its process ended:\n{_tail(self._log)}")
        answer = json.loads(line)
        if "error" in answer:
            raise TurnFailedError(answer["error"])
        return [figures_from(values) for values in answer["ranks"]]

    def _process(self, worker: Worker) -> "subprocess.Popen[str]":
        if worker not in self._processes:
            python = self._pythons.get(worker, Path(sys.executable))
            # torch must find one thread when it is imported: pools do not survive a fork
            threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            # what a killed turn leaves goes with the driver's folder
            temporary = {"TMPDIR": str(self._log.parent)}
            self._processes[worker] = subprocess.Popen(
                [python, "-m", "tools.bench.worker", worker],
                cwd=ROOT,
                env={**os.environ, **threads, **temporary},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._file,
                text=True,
                start_new_session=True,  # Ctrl-C is for the driver alone, which ends the rest
            )
        return self._processes[worker]

    def _end(self, process: "subprocess.Popen[str]") -> None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
