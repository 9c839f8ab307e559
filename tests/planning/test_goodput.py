"""frontier-llm goodput: what it prints and writes, and what it refuses."""

import json

import pytest

from frontier_lab.commands import goodput
from frontier_lab.planning.effective_time import RATES
from frontier_llm.cli.options import run_command


def _run(capsys, *arguments):
    try:
        code = run_command(lambda: goodput.main(arguments))
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.exhaustive
def test_all_ways_to_recover_are_compared_on_all_numbers_of_nodes(capsys, tmp_path):
    file, chart = tmp_path / "goodput.json", tmp_path / "goodput.png"
    code, out, _ = _run(
        capsys, "--nodes", "1024,128", "--failures", "llama3", "--json", str(file),
        "--chart", str(chart),
    )  # fmt: skip
    assert code == 0
    written = json.loads(file.read_text())
    rows = written["results"]
    ways = ["restart", "node-local", "in place"]
    assert [(row["nodes"], row["recovery"]) for row in rows] == [
        (nodes, way) for nodes in (128, 1024) for way in ways
    ]
    restart, _, in_place = rows[3:]
    assert restart["effective"] == pytest.approx(restart["daly_model"], abs=0.002)
    assert 0.97 < restart["effective"] < in_place["effective"] < 1
    assert restart["mtbf_seconds"] == pytest.approx(86400 / (RATES["llama3"] * 1024))
    assert f"{restart['effective']:.4f}" in out
    assert "8,192" in out, "devices: nodes of 8 GPUs"
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_every_assumption_is_printed_with_its_value_and_source(capsys):
    code, out, _ = _run(capsys, "--nodes=64", "--detect=33", "--mtbf=5000", "--json=-")
    assert code == 0
    assumptions = json.loads(out)["assumptions"]
    assert assumptions.keys() == goodput.DEFAULTS.keys() | {"failures"}
    assert assumptions["detect"] == {"value": 33.0, "source": "--detect"}
    assert assumptions["failures"] == {"value": 24 / 5000, "source": "--mtbf"}
    assert assumptions["stall"] == {"value": 1.0, "source": "estimate"}
    code, out, _ = _run(capsys, "--nodes=64", "cluster=a100_80g")
    for name in (*goodput.DEFAULTS, "failures"):
        assert f"--{name} " in out
    assert "cluster a100_80g: NVIDIA" in out


def test_the_planner_gives_the_step_of_an_experiment(capsys):
    code, out, _ = _run(capsys, "experiment=frontier_22b", "--json=-")
    assert code == 0
    written = json.loads(out)
    assert "the planner, gpt_22b" in written["assumptions"]["step"]["source"]
    assert written["assumptions"]["failures"]["source"].startswith("llama3, because")
    first = written["results"][0]["nodes"]
    assert sorted({row["nodes"] for row in written["results"]}) == [first, 4 * first, 16 * first]
    code, out, _ = _run(capsys, "experiment=frontier_22b", "--step=2", "--nodes=7", "--json=-")
    assert json.loads(out)["assumptions"]["step"] == {"value": 2.0, "source": "--step"}


@pytest.mark.exhaustive
def test_spare_nodes_count_as_idle(capsys):
    effective = []
    for spares in ("0", "1"):
        _, out, _ = _run(capsys, "--nodes=99", "--spares", spares, "--json=-")
        effective.append([row["effective"] for row in json.loads(out)["results"]])
    assert effective[1][:2] == effective[0][:2]
    assert effective[1][2] == pytest.approx(0.99 * effective[0][2])


def test_a_fixed_interval_is_rounded_to_whole_steps(capsys):
    _, out, _ = _run(capsys, "--nodes=128", "--interval=1802", "--json=-")
    assert {row["interval_seconds"] for row in json.loads(out)["results"]} == {1800.0}


@pytest.mark.parametrize(("option", "message"), [
    ("--step=0", "a number above 0"),
    ("--step=nan", "a number above 0"),
    ("--detect=-1", "-1 is not a number of 0 or more"),
    ("--unmendable=1.5", "1.5 is not a share from 0 to 1"),
    ("--nodes=0", "a whole number from 1 on"),
    ("--nodes=many", "a whole number from 1 on"),
    ("--failures=never", "never: not a number, nor llama3, rsc1, rsc2"),
    ("--drain-every=0", "a whole number from 1 on"),
    ("--chart=chart.pdf", "chart.pdf does not end with .png or .svg"),
    ("--failures=1e6", "configuration error at nodes"),
    ("cluster=none", "configuration error at cluster"),
])  # fmt: skip
def test_nonsense_is_refused(capsys, option, message):
    code, _, err = _run(capsys, option)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_a_layout_that_does_not_fit_has_no_step_time(capsys):
    code, _, err = _run(capsys, "model=gpt_22b", "cluster=h100_8")
    assert code == 2
    assert "refused for memory" in err
