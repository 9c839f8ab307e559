"""Run a command in a forked process, as a user would, but without the time for imports.

ended = train("run.dir=/tmp/x", "trainer.steps=3")
assert ended.code == 0, ended.text
ended = run(lambda: main(["generate", "/tmp/x", "The "]))

The charts of report.html are not rendered, which takes longer than ten steps, unless `draws`.
"""

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

# what a run imports later on is imported once, before the forks
import frontier_llm.cli.train
import frontier_llm.membership.launcher
import frontier_llm.recovery.generations
import frontier_llm.telemetry.report_page
import frontier_llm.trainer.assemble
import frontier_llm.trainer.callbacks.records
import frontier_llm.trainer.callbacks.run_report
import frontier_llm.trainer.loop  # noqa: F401
from frontier_llm.cli.compose import compose
from frontier_llm.cli.main import main
from frontier_llm.telemetry import figures, html_page
from tests.patience import Limit, wait_until

TINY = (
    "model.layers=2", "model.hidden=32", "model.heads=2", "model.vocabulary=300",
    "data=text", "data.vocabulary=300", "data.sequence_length=32", "data.global_batch=4",
    "data.micro_batch=1", "trainer.evaluate_every_steps=null", "trainer.evaluate_batches=1",
    "trainer.sample_tokens=0", "precision=fp32", "telemetry.wandb=off", "launch.ranks=2",
    "telemetry.console_every_steps=1", "launch.threads=1",
)  # fmt: skip


# kept for all forks: the files of hydra, its grammar, and a compiled page
compose(TINY)
html_page._macros()


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    code: int
    text: str
    """Standard output and standard error."""


class Forked:
    """A function that returns an exit code, in its own session of processes."""

    _outputs: ClassVar[dict[int, Path]] = {}
    """By process id: the output of those whose end was not waited for."""

    def __init__(self, function: Callable[[], int], *, draws: bool = False) -> None:
        torch.set_num_threads(1)
        self._output = Path(tempfile.mkstemp(prefix="train_")[1])
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _child(self._output, function, draws)
        self._outputs[self.pid] = self._output

    def kill(self) -> None:
        """Kill every process of the session."""
        os.killpg(self.pid, signal.SIGKILL)

    def said(self) -> str:
        """Return what the processes have printed until now."""
        return self._output.read_text()

    def wait(self, timeout: float = 90) -> Ended:
        """Wait for the end of the run; kill it when `Limit(timeout)` is over."""
        limit = Limit(timeout)
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if limit.is_over:
                self.kill()
            time.sleep(0.01)
        del self._outputs[self.pid]
        text = self._output.read_text()
        self._output.unlink()
        return Ended(os.waitstatus_to_exitcode(ended[1]), text)

    @classmethod
    def wait_until(cls, condition: Callable[[], Any], what: str) -> None:
        """Wait for something that a run does, but not beyond the end of all runs."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT

        def happened() -> bool:
            runs = any(os.waitid(os.P_PID, pid, options) is None for pid in cls._outputs)
            done = bool(condition())
            texts = (path.read_text() for path in cls._outputs.values())
            assert done or runs, f"the runs ended without {what}\n" + "\n".join(texts)
            return done

        wait_until(happened, what)


class Training(Forked):
    """A training run."""

    def __init__(self, *overrides: str, draws: bool = False) -> None:
        super().__init__(lambda: main(["train", *overrides]), draws=draws)


def run(function: Callable[[], int]) -> Ended:
    """Call a function that returns an exit code; wait for its end."""
    return Forked(function).wait()


def train(*overrides: str, draws: bool = False) -> Ended:
    """Start a run and wait for its end."""
    return Training(*overrides, draws=draws).wait()


def _leave_charts_empty() -> None:
    for name in list(vars(figures)):
        if name.endswith("_figure"):
            chart = f'<svg role="img" aria-label="{name.removesuffix("_figure")}"></svg>'
            setattr(figures, name, lambda *_, chart=chart, **__: chart)


def _child(output: Path, function: Callable[[], int], draws: bool) -> None:
    code = 70
    try:
        if not draws:
            _leave_charts_empty()
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        file = os.open(output, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            del os.environ[name]
        code = function()
    except SystemExit as stopped:  # hydra ends a sweep like this
        code = stopped.code if isinstance(stopped.code, int) else 1
    except BaseException:
        traceback.print_exc()  # nobody else would print it
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
