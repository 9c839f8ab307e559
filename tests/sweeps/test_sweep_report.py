"""The table, the picture and the ranking of a sweep."""

import json
import random
from dataclasses import asdict, replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_lab.sweeps.sweep_report import main, sensitivity_table
from frontier_lab.sweeps.sweep_trials import (
    ONLY_CHANCE,
    Trial,
    axes,
    pareto,
    random_influence,
    read,
    sensitivity,
)
from frontier_llm.errors import DataError
from frontier_llm.units import GIB


def _trial(tensor, micro_batch, speed, memory=1.0, status="done", reason=""):
    overrides = ["experiment=x", f"parallel.tensor={tensor}", f"+data.micro_batch={micro_batch}"]
    peak = int(memory * GIB) if status == "done" else None
    return Trial(overrides, status, reason, 10.0, float(speed), peak, 4.0, None)


TRIALS = [
    _trial(1, 1, 100, 2), _trial(1, 2, 110, 3), _trial(2, 1, 200, 2.5), _trial(2, 2, 210, 4),
    _trial(4, 1, 0, status="refused", reason="configuration error at plan\n  got:    80 GiB\n"),
]  # fmt: skip


def test_axes_are_the_keys_that_vary():
    assert axes(TRIALS) == {
        "data.micro_batch": ["1", "2", "1", "2", "1"],
        "parallel.tensor": ["1", "1", "2", "2", "4"],
    }


def test_the_axis_that_decides_comes_first():
    shares = sensitivity(TRIALS)
    assert list(shares) == ["parallel.tensor", "data.micro_batch"]
    assert shares["parallel.tensor"] > 0.95 > 0.2 > shares["data.micro_batch"]


def test_each_axis_of_a_full_grid_has_the_variance_of_its_means():
    """100, 110, 200, 210: the micro-batch moves a speed by 5, the tensor size by 50."""
    shares = sensitivity(TRIALS[:4])
    assert shares["parallel.tensor"] == pytest.approx(50**2 / (50**2 + 5**2))
    assert sum(shares.values()) == pytest.approx(1)


@given(data=st.data())
def test_shares_are_of_one_total_and_those_without_influence_have_none(data):
    """Overlapping axes share what both explain, however few trials there are."""
    settings = data.draw(st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=2, max_size=12))
    depends = data.draw(st.booleans())
    trials = [
        Trial([f"a={a}", f"b={b}", f"c={c}"], "done", "", 1.0, float(depends * a), 1, None, None)
        for a, b, c in settings
    ]
    shares = sensitivity(trials)
    assert all(share >= 0 for share in shares.values())
    assert sum(shares.values()) <= 1 + 1e-9
    varies = len({a for a, _, _ in settings}) > 1
    assert sum(shares.values()) == pytest.approx(float(depends and varies))


def test_influence_by_chance_is_what_random_speeds_show():
    draw = random.Random(1).random
    totals = []
    for _ in range(200):
        trials = [_trial(n % 4, n // 4 % 3, draw()) for n in range(24)]
        totals.append(sum(sensitivity(trials).values()))
    assert fmean(totals) == pytest.approx(random_influence(trials), rel=0.1)
    assert random_influence(trials) == pytest.approx(5 / 23)


def test_few_trials_are_called_noise():
    assert "mostly noise" in "\n".join(sensitivity_table(TRIALS[:4]))
    many = [_trial(n % 2, n // 2, n) for n in range(4)] * 10
    assert "noise:" not in "\n".join(sensitivity_table(many))


def test_an_axis_that_changes_nothing_explains_nothing():
    assert sensitivity([_trial(1, 1, 5), _trial(2, 1, 5)]) == {"parallel.tensor": 0.0}


def test_no_best_trial_is_beaten_in_both():
    best = [(p.tokens_per_second, p.peak_bytes / GIB) for p in pareto(TRIALS)]
    assert best == [(210, 4), (200, 2.5), (100, 2)]


@pytest.fixture
def folder(tmp_path):
    for number, trial in enumerate(TRIALS):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "trial.json").write_text(json.dumps(asdict(trial)))
    return tmp_path


def test_the_fastest_learning_rate_is_not_called_the_best(tmp_path, capsys):
    def report(*values, key="optimizer.learning_rate", **changes):
        for number, value in enumerate(values):
            (tmp_path / str(number)).mkdir(exist_ok=True)
            overrides = [f"{key}={value}"]
            replace(TRIALS[number], overrides=overrides, **changes).write(tmp_path / str(number))
        assert main([str(tmp_path)]) == 0
        return capsys.readouterr().out

    said = report(0.001, 0.01)
    assert ONLY_CHANCE in said
    assert "Best: " not in said
    assert "Best: validation loss 3.0000" in report(1, 2, goal="loss", validation_loss=3.0)
    assert "Best: 110 tokens/s" in report("adamw", "muon", key="optimizer.name")


def test_the_report_has_every_trial_and_why_it_failed(folder, capsys):
    assert [trial.tokens_per_second for trial in read(folder)] == [210, 200, 110, 100, 0]
    assert main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert "4 of 5 trials done" in said
    assert "| 210 * | 4.0000 | 4.00 | 2 | 2 | 10.0 s | done |" in said
    assert "Best: 210 tokens/s: `data.micro_batch=2 parallel.tensor=2`" in said
    assert "refused: plan got: 80 GiB" in said
    assert (folder / "sweep.md").read_text().strip() in said
    assert "| 5 | 210 |" in said
    for picture in ("pareto.svg", "convergence.svg"):
        assert "<svg" in (folder / picture).read_text()


def test_a_repeated_setting_is_one_row(folder, capsys):
    (folder / "9").mkdir()
    TRIALS[3].write(folder / "9")
    assert main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert "4 of 5 trials done" in said
    assert said.count("| 210 * |") == 1


@pytest.mark.parametrize("text", ["", "[]", '{"status": "done"}'])
def test_a_damaged_trial_is_named(folder, text):
    (folder / "3" / "trial.json").write_text(text)
    with pytest.raises(DataError, match=r"3/trial\.json is damaged"):
        read(folder)


def test_a_folder_without_trials_is_said(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "contains no trial.json" in capsys.readouterr().err


def test_other_searches_stand_beside_the_sweep(folder, tmp_path_factory, capsys):
    others = []
    for speed in (30, 50):
        others.append(tmp_path_factory.mktemp("random"))
        (others[-1] / "0").mkdir()
        _trial(1, 1, speed).write(others[-1] / "0")
    assert main([str(folder), "--beside", *map(str, others)]) == 0
    assert "| trials | this search | others |" in capsys.readouterr().out


def test_a_sweep_over_nodes_is_compared_per_device(folder, capsys):
    for number, (trial, ranks) in enumerate(zip(TRIALS, (1, 1, 8, 8, 8), strict=True)):
        replace(trial, ranks=ranks, goal="speed_per_device").write(folder / str(number))
    assert main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.index("| 110.0 * |") < said.index("| 26.2")
    assert "tokens/s per device" in said


def test_a_search_for_the_lowest_loss_draws_the_losses(folder, capsys):
    """The slowest trial has the lowest loss; the refused one has none."""
    for number, (trial, loss) in enumerate(zip(TRIALS, (2.5, 3.25, 3.5, 4.5, None), strict=True)):
        replace(trial, validation_loss=loss, goal="loss").write(folder / str(number))
        (folder / str(number) / "run").mkdir()
        rows = [{"step": step, "loss": 5.0 - step} for step in (1, 2)] if loss else []
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / str(number) / "run" / "metrics.jsonl").write_text(text)
    assert main([str(folder)]) == 0
    said = capsys.readouterr().out
    rows = [line.split(" | ") for line in said.splitlines() if line.startswith("| ")]
    assert rows[0][:3] == ["| validation loss", "tokens/s", "loss"]
    assert [row[0] for row in rows[1:6]] == [
        "| 2.5000 *",
        "| 3.2500",
        "| 3.5000",
        "| 4.5000",
        "| -",
    ]
    assert "Best: validation loss 2.5000: `data.micro_batch=1 parallel.tensor=1`" in said
    assert "share of the variance of the validation loss" in said
    shares = sensitivity(read(folder))
    assert 0.4 < shares["parallel.tensor"] <= 1  # the refused trial does not drown the others
    assert "<svg" in (folder / "losses.svg").read_text()
    assert "(losses.svg)" in said
