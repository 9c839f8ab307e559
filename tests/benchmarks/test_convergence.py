"""Curves of several runs are compared correctly, and runs that are complete are not repeated."""

import json
from pathlib import Path

import pytest

from benchmarks import convergence
from benchmarks.convergence import Curve, differences, draw, main, means, rows
from docs.generate.drawing import svg


def curve(run: str, *losses: float, seed: int = 1) -> Curve:
    return Curve(run, seed, len(losses), list(enumerate(losses, start=1)))


def write_run(folder: Path, losses: list[float]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"step": step, "loss": loss, "validation_loss": loss})
        for step, loss in enumerate(losses, start=1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9, "lo']))


def test_curves_are_compared_at_their_last_common_step(tmp_path):
    for name, losses in {"plain": [8.0, 7.0, 6.0], "zeropp": [8.0, 7.07]}.items():
        write_run(tmp_path / name, losses)
    curves = [Curve.read(name, 1, tmp_path / name) for name in ("plain", "zeropp")]
    assert list(rows(curves)) == [
        ["plain", "3", "6.0000", "+0.00%", "", "+0.00%", "+0.000%"],
        ["zeropp", "2", "7.0700", "+1.00%", "", "+1.00%", "+0.500%"],
    ]
    assert "zeropp" in svg(lambda: draw(curves))


def test_differences_do_not_depend_on_the_order_of_the_runs():
    curves = [curve("zeropp", 8.0, 5.0), curve("plain", 4.0, 5.0, 6.0)]
    assert differences(curves[0], curves) == [(1, 100.0), (2, 0.0)]
    assert differences(curves[0], curves[:1]) == []


def test_a_seed_is_compared_with_its_own_plain_run():
    curves = [
        curve("plain", 4.0, seed=1), curve("plain", 5.0, seed=2),
        curve("zeropp", 4.4, seed=1), curve("zeropp", 4.9, seed=2),
    ]  # fmt: skip
    # +10% and -2%: 4% on average, 6% of standard error
    wanted = ["zeropp", "1", "4.6500", "+4.00%", "6.00%", "+10.00%, -2.00%", "+4.000%"]
    assert list(rows(curves))[1] == wanted


def test_the_mean_is_taken_at_common_steps():
    assert means([[(1, 2.0), (2, 4.0), (3, 9.0)], [(2, 6.0), (1, 1.0)]]) == [(1, 1.5), (2, 5.0)]
    assert means([[(1, 2.0)], []]) == means([]) == []


@pytest.mark.parametrize("option", ["--slice", "--steps", "--every", "--seeds"])
def test_invalid_options_are_rejected(option):
    with pytest.raises(SystemExit, match="2"):
        main([option, "0"])


def test_runs_take_turns_and_only_what_is_missing_is_trained(tmp_path, monkeypatch):
    trained = []

    def train(keys, folder):
        (goal,) = (int(key.rpartition("=")[2]) for key in keys if key.startswith("trainer.steps="))
        trained.append((folder.parent.name, folder.name, goal))
        write_run(folder, [8.0 - step / 10 for step in range(goal)])

    monkeypatch.setattr(convergence, "train_run", train)
    write_run(tmp_path / "plain" / "seed_1", [8.0, 7.0])
    files = ["--picture", str(tmp_path / "x.svg"), "--json", str(tmp_path / "x.json")]
    arguments = ["--steps", "5", "--slice", "2", "--runs", "plain", "zeropp", "--seeds", "1"]
    assert main([*arguments, "--folder", str(tmp_path), *files]) == 0
    goals = [(run, goal) for run, _, goal in trained]
    assert goals == [("zeropp", 2), ("plain", 4), ("zeropp", 4), ("plain", 5), ("zeropp", 5)]
    found = json.loads((tmp_path / "x.json").read_text())["curves"]
    assert [(one["run"], one["steps"]) for one in found] == [("plain", 5), ("zeropp", 5)]
    assert "zeropp" in (tmp_path / "x.svg").read_text()
