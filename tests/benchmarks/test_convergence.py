"""Curves of several runs are compared correctly; no run outlives the program that started it."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from benchmarks import convergence
from benchmarks.convergence import Curve, differences, draw, main, means, table
from frontier_llm.errors import StopRequested


def curve(kind: str, *losses: float, seed: int = 1) -> Curve:
    return Curve(kind, seed, len(losses), list(enumerate(losses, start=1)))


def test_curves_are_compared_at_their_last_common_step(tmp_path):
    for name, losses in {"plain": [8.0, 7.0, 6.0], "zeropp": [8.0, 7.07]}.items():
        (tmp_path / name).mkdir()
        rows = [
            {"step": step, "loss": loss, "validation_loss": loss}
            for step, loss in enumerate(losses, start=1)
        ]
        text = "\n".join([*map(json.dumps, rows), '{"step": 9, "lo'])
        (tmp_path / name / "metrics.jsonl").write_text(text)
    curves = [Curve.read(name, 1, tmp_path / name) for name in ("plain", "zeropp")]
    assert table(curves)[2:] == [
        "| `plain` | 3 | 6.0000 | +0.00% |  | +0.00% | +0.000% |",
        "| `zeropp` | 2 | 7.0700 | +1.00% |  | +1.00% | +0.500% |",
    ]
    draw(curves, tmp_path / "curves.svg")
    assert "zeropp" in (tmp_path / "curves.svg").read_text()


def test_differences_do_not_depend_on_the_order_of_the_runs(tmp_path):
    curves = [curve("zeropp", 8.0, 5.0), curve("plain", 4.0, 5.0, 6.0)]
    assert differences(curves[0], curves) == [(1, 100.0), (2, 0.0)]
    assert differences(curves[0], curves[:1]) == []
    draw([*curves, Curve("zeropp_feedback", 1, 1, [])], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_a_seed_is_compared_with_its_own_plain_run():
    curves = [
        curve("plain", 4.0, seed=1), curve("plain", 5.0, seed=2),
        curve("zeropp", 4.4, seed=1), curve("zeropp", 4.9, seed=2),
    ]  # fmt: skip
    # +10% and -2%: 4% on average, 6% of standard error
    row = "| `zeropp` | 1 | 4.6500 | +4.00% | 6.00% | +10.00%, -2.00% | +4.000% |"
    assert table(curves)[3] == row


def test_the_mean_is_taken_at_common_steps():
    assert means([[(1, 2.0), (2, 4.0), (3, 9.0)], [(2, 6.0), (1, 1.0)]]) == [(1, 1.5), (2, 5.0)]
    assert means([[(1, 2.0)], []]) == means([]) == []


@pytest.mark.parametrize(
    "options",
    [
        ["--slice", "0"],
        ["--steps", "0"],
        ["--every", "0"],
        ["--minutes", "0"],
        ["--seeds", "0"],
        ["--picture", "a"],
    ],
)
def test_invalid_options_are_rejected(options):
    with pytest.raises(SystemExit):
        convergence.parse(options)


def test_only_an_unsaved_run_is_removed(tmp_path):
    kept, saved, unsaved = (tmp_path / name for name in ("kept", "saved", "unsaved"))
    (saved / "checkpoints" / "step_000010").mkdir(parents=True)
    for folder in (kept, unsaved):
        folder.mkdir()
    (kept / "notes.txt").touch()
    for folder in (saved, unsaved):
        (folder / "config.yaml").touch()
    for folder in (kept, saved, unsaved):
        convergence._clear_unsaved(folder)
    assert [folder.exists() for folder in (kept, saved, unsaved)] == [True, True, False]


def test_a_stop_signal_is_forwarded_to_the_run(tmp_path, monkeypatch):
    here = tmp_path / "pid"
    run = f"""
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit({StopRequested.exit_code}))
pathlib.Path({str(here)!r}).write_text(str(os.getpid()))
time.sleep(60)
"""
    monkeypatch.setattr(convergence, "command", lambda *_: [sys.executable, "-c", run])
    tool = os.fork()
    if not tool:
        code = 70
        try:
            files = ["--picture", str(tmp_path / "x.svg"), "--json", str(tmp_path / "x.json")]
            code = main(["--folder", str(tmp_path / "runs"), *files])
        finally:
            os._exit(code)
    while not (here.exists() and here.read_text()):
        time.sleep(0.02)
    os.kill(tool, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(tool, 0)[1]) == StopRequested.exit_code
    assert not Path("/proc", here.read_text()).exists()
