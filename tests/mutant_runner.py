"""A plugin of pytest that runs tests with the mutants of tests/draw_mutants.py.

The package has all mutants, and the variable `MUTANT` has the index of the one that is active. The
tests are imported once, and each run of tests is a fork of this process. Files of tests run one
after another, the shortest first: once without a mutant, which shows which mutants each test
reaches, and then with each mutant that is reached and still alive, until a test fails. A
program that a test starts without this process's variables has no active mutant.
"""

import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import LONGEST

FOLDER = Path(os.environ.get("MUTANTS_FOLDER", ""))


@dataclass
class Reach:
    """What a run without a mutant has shown about the tests of a file."""

    items: list[pytest.Item]
    """Those that pass."""
    seconds: dict[str, float]
    tests: dict[int, set[str]]
    """Those that reach a mutant."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how long a phase of a test took, and how it failed."""
    with (FOLDER / "reports").open("a") as file:
        reason = str(getattr(report.longrepr, "reprcrash", report.longrepr))[-120:]
        failure = repr(reason) if report.failed else ""
        file.write(f"{report.nodeid}\t{report.duration}\t{failure}\n")


def run(items: Sequence[pytest.Item], limit: float, mutant: int | None = None) -> str:
    """Run tests in a forked process, with a mutant until one fails; return how that ended.

    Args:
        items: tests, in their order.
        limit: in seconds, for all of them.
        mutant: index of the active mutant; None = none is active.
    """
    (FOLDER / "reports").write_text("")
    pid = os.fork()
    if not pid:
        try:
            os.setsid()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            if mutant is not None:
                os.environ["MUTANT"] = str(mutant)
            for item, following in zip(items, [*items[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if mutant is not None and failures():
                    break
            os._exit(0)
        finally:
            os._exit(1)
    end = time.monotonic() + limit
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.02)
    if not ended[0]:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "endless"
    return "crashed" if ended[1] else "killed" if failures() else "alive"


def reports() -> list[list[str]]:
    """Return test, seconds and the failure, by phase of the tests of the last run."""
    return [line.split("\t") for line in (FOLDER / "reports").read_text().splitlines()]


def failures() -> set[str]:
    """Return the tests of the last run that failed."""
    return {test for test, _, failure in reports() if failure}


def pytest_runtestloop(session: pytest.Session) -> bool:
    """Run the tests of each room with the mutants of the room: short files, then long ones."""
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in session.items:
        files[item.nodeid.partition("::")[0]].append(item)
    rooms = json.loads((FOLDER / "rooms").read_text())
    known: dict[str, Reach] = {}
    reached: set[int] = set()
    for is_long in (False, True):
        for room in rooms:
            names = [name for name in files if name.startswith(tuple(room["tests"]))]
            names = [name for name in names if is_long == (name[6:-3] in LONGEST)]
            # first those named after a file with a mutant; of long files the shortest first
            names.sort(key=lambda name: Path(name).stem.removeprefix("test_") not in room["stems"])
            for name in names if not is_long else reversed(names):
                if room["mutants"]:
                    known[name] = known.get(name) or find_reach(files[name])
                    reached |= known[name].tests.keys()
                    kill(room["mutants"], known[name])
    for room in rooms:
        for index, text in room["mutants"].items():
            unreached = "" if int(index) in reached else "  reached by no test"
            say(f"{int(index) + 1:3}  SURVIVED {text}{unreached}")
    return True


def kill(alive: dict[str, str], reach: "Reach") -> None:
    """Run the tests of a file with each mutant that they reach; remove those that are killed."""
    for key in [key for key in alive if int(key) in reach.tests]:
        tests, seconds = reach.tests[int(key)], reach.seconds
        order = sorted(reach.items, key=lambda i: (i.nodeid not in tests, seconds[i.nodeid]))
        result = run(order, 90 + 5 * sum(seconds.values()), int(key))
        if result != "alive":
            by = [f"{test}: {failure}" for test, _, failure in reports() if failure]
            say(f"{int(key) + 1:3}  {result:8} {alive.pop(key)}  {''.join(by[:1])}")


def find_reach(items: list[pytest.Item]) -> Reach:
    """Run the tests of a file without a mutant."""
    (FOLDER / "reached").write_text("")
    run(items, 3600)
    seconds: dict[str, float] = defaultdict(float)
    for test, duration, _ in reports():
        seconds[test] += float(duration)
    failed = failures()
    if failed:
        say(f"fail without a mutant: {sorted(failed)}")
    reach: dict[int, set[str]] = defaultdict(set)
    for line in (FOLDER / "reached").read_text().splitlines():
        place, _, test = line.partition("\t")
        reach[int(place)].add(test)
    say(f"{items[0].path.name}: {sum(seconds.values()):.0f} s, reaches {sorted(reach)}")
    return Reach([item for item in items if item.nodeid not in failed], seconds, reach)


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
