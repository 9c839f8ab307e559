"""Start and stop the workers of bench_sharding.py: one process per library, when first needed.

DeepSpeed, which is no dependency of this project, has a virtual environment of its own.
"""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TextIO

from rich.console import Console

from benchmarks.harness import ROOT
from benchmarks.peers.contenders import BuilderModule
from benchmarks.peers.turn import RankFigures, Turn
from frontier_llm.errors import LaunchError

DEEPSPEED_FOLDER = ROOT / ".venv-deepspeed"
DEEPSPEED_PACKAGE = "deepspeed==0.19.8"


class Workers:
    """The worker processes; the end of the context kills them and their ranks.

    `log` receives the output of libraries; temporary files are written to its folder.
    """

    def __init__(self, log: Path, status: Console) -> None:
        self._log, self._status = log, status
        self._processes: dict[BuilderModule, subprocess.Popen[str]] = {}

    def __enter__(self) -> "Workers":
        self._file: TextIO = self._log.open("a")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            _end(process)
        self._file.close()

    def run(self, builder: BuilderModule, turn: Turn) -> list[RankFigures]:
        """Run a turn on a worker; return the measurements of its ranks.

        Raises:
            LaunchError: the turn failed; the message has the traceback of the first rank that
                failed.
        """
        if builder not in self._processes:
            self._processes[builder] = self._start(builder)
        process = self._processes[builder]
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(turn.to_json() + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            _end(self._processes.pop(builder))
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise LaunchError(f"the worker process ended:\n{tail}")
        answer = json.loads(line)
        if "error" in answer:
            raise LaunchError(answer["error"])
        return [RankFigures(**values) for values in answer["ranks"]]

    def _start(self, builder: BuilderModule) -> "subprocess.Popen[str]":
        is_deepspeed = builder == "deepspeed_peer"
        python = deepspeed_python(self._status) if is_deepspeed else Path(sys.executable)
        # torch must start with one thread, because thread pools do not survive a fork
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        # files of a killed turn are removed with the driver's folder
        temporary = {"TMPDIR": str(self._log.parent)}
        return subprocess.Popen(
            [python, "-m", "benchmarks.peers.worker", builder],
            cwd=ROOT,
            env={**os.environ, **threads, **temporary},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._file,
            text=True,
            start_new_session=True,  # Ctrl-C reaches this process only, which ends the workers
        )


def _end(process: "subprocess.Popen[str]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.communicate()


def deepspeed_python(console: Console) -> Path:
    """Return the interpreter of an environment with DeepSpeed; make the environment if needed.

    The environment has the same version of torch as this one. Its file `ready` names the packages,
    and is written last.

    Raises:
        LaunchError: the environment cannot be made; the message contains that of pip.
    """
    folder = DEEPSPEED_FOLDER
    python, ready = folder / "bin" / "python", folder / "ready"
    torch = f"torch=={importlib.metadata.version('torch').partition('+')[0]}"
    wanted = f"{torch} {DEEPSPEED_PACKAGE}"
    if ready.exists() and ready.read_text() == wanted:
        return python
    console.print(f"making {folder.name} with {wanted}")
    _do([sys.executable, "-m", "venv", "--clear", str(folder)])
    (folder / ".gitignore").write_text("*\n")
    # torch first, because DeepSpeed uses the installed version
    for package in (torch, DEEPSPEED_PACKAGE):
        _do([str(python), "-m", "pip", "install", "--quiet", package])
    ready.write_text(wanted)
    return python


def _do(command: list[str]) -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise LaunchError(
            f"{' '.join(command)!r} failed; omit --deepspeed, or fix this:\n"
            + "\n".join(done.stderr.splitlines()[-10:])
        )
