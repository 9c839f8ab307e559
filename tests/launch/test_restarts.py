"""Ranks are started again after a failure that may have passed, a limited number of times."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.errors import ConfigError, TrainingError
from frontier_llm.launch import launcher
from frontier_llm.launch.launcher import LaunchOptions, launch_with_restarts
from frontier_llm.launch.world import World

SCRIPTS = Path(__file__).parents[2] / "scripts"


def die(world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def work(world: World) -> None:
    """Do nothing, and end."""


def raises(error: Exception) -> Callable[[World], None]:
    def target(world: World) -> None:
        raise error

    return target


def run(
    behaviours: list[Callable[[World], None]], steps: list[int], restarts: int, folder: Path
) -> tuple[int, int]:
    """Start ranks that do the next behaviour at each start; return exit code and starts."""
    starts = 0

    def target(start: int) -> Any:
        nonlocal starts
        starts += 1
        behaviour = behaviours[min(start, len(behaviours) - 1)]
        return lambda world, store: behaviour(world)

    counts = iter(steps)
    options = LaunchOptions(ranks=2, failure_dir=folder / "failures")
    return launch_with_restarts(target, options, restarts, lambda: next(counts)), starts


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRONTIER_LLM_STARTED_AGAIN", "0")
    for name in ("PATIENCE_SECONDS", "TERMINATION_SECONDS"):
        monkeypatch.setattr(launcher, name, 0.1)


@pytest.mark.parametrize(
    ("behaviours", "steps", "restarts", "expected"),
    [
        ([work], [0], 2, (0, 1)),
        ([die, work], [0, 3], 1, (0, 2)),
        ([raises(RuntimeError("lost")), die, work], [0, 0, 0], 2, (0, 3)),
        ([die], [0, 0, 0], 1, (1, 2)),
        ([die], [0], 0, (1, 1)),
        # each new step permits as many tries again
        ([die, die, die, work], [0, 5, 9, 12], 1, (0, 4)),
        # an older step is not a new one
        ([die], [9, 9, 4, 8], 2, (1, 3)),
        ([raises(TrainingError("the loss is not finite"))], [0], 3, (1, 1)),
        ([raises(ConfigError("a", 1, "b", "c"))], [0], 3, (2, 1)),
    ],
)
def test_starts(
    behaviours: list[Callable[[World], None]],
    steps: list[int],
    restarts: int,
    expected: tuple[int, int],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run(behaviours, [*steps, *steps[-1:]], restarts, tmp_path) == expected
    code, starts = expected
    told = capfd.readouterr().err
    assert told.count("started again, from its newest checkpoint") == starts - 1
    if code == 1 and restarts and behaviours == [die]:
        assert told.rstrip().endswith("it is not started again")


COMMAND = """
echo start >> starts
if [ "$(wc --lines < starts)" -gt 1 ] && [ "$FRONTIER_LLM_STARTED_AGAIN" != 1 ]; then exit 99; fi
"""


@pytest.mark.parametrize(
    ("command", "code", "starts"),
    [
        ("exit 0", 0, 1),
        ("exit 2", 2, 1),
        ("exit 3", 3, 1),
        ("exit 137", 137, 3),
        ("[ $(wc --lines < starts) -gt 2 ]", 0, 3),
        ("""mkdir --parents run/failures; echo '{"kind": "user"}' > run/failures/cause.json
        exit 1""", 1, 1),
        ("""mkdir --parents run/failures; echo '{"kind": "watchdog"}' > run/failures/cause.json
        exit 1""", 1, 3),
        ("""mkdir --parents run; [ $(wc --lines < starts) -lt 5 ] || exit 0
        echo "{\\"step\\": $(wc --lines < starts), \\"loss\\": 1}" >> run/metrics.jsonl
        exit 137""", 0, 5),
    ],
)  # fmt: skip
def test_a_job_script_starts_the_ranks_again(
    command: str, code: int, starts: int, tmp_path: Path
) -> None:
    (tmp_path / "train").write_text(f"set -eu\n{COMMAND}{command}\n")
    script = f"set -euo pipefail\nsource {SCRIPTS}/restarts.sh\n"
    script += "train_with_restarts bash ./train run.dir=other run.dir=run\n"
    environment = {**os.environ, "FRONTIER_LLM_RESTARTS": "2"}
    ended = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (ended.returncode, len((tmp_path / "starts").read_text().splitlines())) == (code, starts)
