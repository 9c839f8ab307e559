"""Generated tables and charts are current, in pages that people write, and notice other data."""

import json
from dataclasses import replace
from typing import get_args

import pytest

from docs.generate import (
    __main__,
    benchmark_charts,
    blocks,
    comparison_page,
    goodput_page,
    measured_tables,
    rates_chart,
)
from docs.generate.__main__ import MODULES, keep_current, main
from docs.generate.blocks import RESULTS, ROOT, filled, sharding_case
from docs.generate.drawing import chart, svg
from docs.generate.measured_tables import Table
from frontier_llm.config.optimizer import Schedule
from tests.covering import covering

PAGE = """above
<!-- one -->
old
<!-- end of one -->
between
<!-- two -->
<!-- end of two -->
below
"""


@pytest.mark.parametrize(
    "name",
    covering(
        ["measured", "charts", "comparison", "rates", "goodput", "sharding", "collectives"],
        ["goodput", "sharding"],
    ),
)
def test_what_is_made_quickly_is_current(name, capsys):
    assert main([name]) == 0, capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["models_and_clusters", "observations"])
def test_what_is_predicted_is_current(name, capsys):
    """CI runs the slowest generators, `planner` and `scoreboard`, by themselves."""
    assert name in MODULES
    assert main([name]) == 0, capsys.readouterr().err


def test_what_is_written_by_hand_stays():
    wanted = PAGE.replace("old", "1\n2")
    assert filled(PAGE, {"one": iter(["1", "2"])}) == wanted
    assert filled(wanted, {"one": ["1", "2"]}) == wanted
    assert filled(PAGE, {"two": ["x"]}) == PAGE.replace("<!-- end of two", "x\n<!-- end of two")


@pytest.mark.parametrize("missing", ["<!-- one -->\n", "<!-- end of one -->"])
def test_a_page_without_a_marker_is_refused(missing):
    with pytest.raises(ValueError, match="markers of one"):
        filled(PAGE.replace(missing, ""), {"one": ["1"]})


def test_a_stale_file_is_named_with_what_to_do(tmp_path, capsys):
    wanted = {tmp_path / "page.md": "new", tmp_path / "images" / "a.svg": "drawn"}
    (tmp_path / "page.md").write_text("old")
    assert keep_current("x", wanted, write=False) == 2
    assert capsys.readouterr().err.splitlines() == [
        "page.md is not current: python -m docs.generate x --write",
        "a.svg is not current: python -m docs.generate x --write",
    ]
    assert keep_current("x", wanted, write=True) == 0
    assert keep_current("x", wanted, write=False) == 0


def test_a_page_that_was_changed_is_stale(tmp_path, monkeypatch, capsys):
    page = tmp_path / "docs" / "sharding.md"
    page.parent.mkdir()
    current = (ROOT / "docs" / "sharding.md").read_text()
    page.write_text(current.replace("| `zero3` |", "| `zero4` |"))
    monkeypatch.setattr(__main__, "ROOT", tmp_path)
    assert main(["sharding"]) == 1
    assert "sharding.md is not current" in capsys.readouterr().err


def test_what_is_not_understood_is_refused(capsys):
    for arguments in (["--wirte"], ["horoscope"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
    assert "no generator horoscope" in capsys.readouterr().err


def test_a_value_that_was_not_measured_is_an_empty_cell(monkeypatch):
    rows = [{"a": 1.25, "b": None}, {"a": 2.0}]
    monkeypatch.setattr(measured_tables, "load", lambda _: {"rows": rows, "date": "today"})
    lines = Table("x", {"one": "{a:.1f} s", "two": "{b} ms"}, after="({date})")()
    wanted = ["| one | two |", "|---|---|", "| 1.2 s |  |", "| 2.0 s |  |", "", "(today)"]
    assert list(lines) == wanted


def test_a_chart_of_other_data_is_drawn_again(tmp_path, monkeypatch):
    file = tmp_path / "a.svg"
    drawn = chart(file, __file__, b"one", rates_chart.draw)
    file.write_text(drawn)
    kept = chart(file, __file__, b"one", lambda: pytest.fail("drawn without a need"))
    assert kept == drawn
    assert chart(file, __file__, b"two", rates_chart.draw) != drawn
    faults = json.loads((RESULTS / "faults.json").read_text())
    faults["rows"][0]["nodes_free_after"] = "99 s"
    for name, _ in benchmark_charts.CHARTS.values():
        (tmp_path / f"{name}.json").write_text((RESULTS / f"{name}.json").read_text())
    (tmp_path / "faults.json").write_text(json.dumps(faults))
    for module in (blocks, benchmark_charts):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    stale = [
        file.name for file, text in benchmark_charts.images().items() if file.read_text() != text
    ]
    assert stale == ["faults.svg"]


@pytest.mark.exhaustive
def test_charts_of_other_figures_are_drawn_again(tmp_path, monkeypatch):
    (text,) = rates_chart.images().values()
    assert text == rates_chart.FILE.read_text()
    rate, colour = rates_chart.SCHEDULES["cosine"]
    other = replace(rate, minimum=0.2)
    monkeypatch.setitem(rates_chart.SCHEDULES, "cosine", (other, colour))
    (text,) = rates_chart.images().values()
    assert text != rates_chart.FILE.read_text()
    monkeypatch.setattr(goodput_page, "CHART", tmp_path / "chart.svg")
    assert goodput_page.images()[tmp_path / "chart.svg"].startswith("<?xml")


def test_a_chart_shows_its_figures():
    drawn = svg(benchmark_charts.sharding)
    rows = sharding_case(0, ranks=2, precision="bf16", link="1 Gbit/s")
    assert "ours-zeropp+zeropp" in drawn
    assert f">{rows['ours-zeropp+zeropp']['tokens_per_second']}<" in drawn


def test_every_schedule_of_the_learning_rate_is_drawn():
    assert {rate.schedule for rate, _ in rates_chart.SCHEDULES.values()} == set(get_args(Schedule))


def test_the_speeds_of_the_comparison_are_quotients_of_rows():
    rows = sharding_case(0, ranks=2, precision="bf16", link="1 Gbit/s")
    wanted = rows["ours-zero3"]["tokens_per_second"] / rows["fsdp"]["tokens_per_second"]
    (row,) = [line for line in comparison_page.comparison() if "ZeRO-3, 1 Gbit/s" in line]
    assert row.split(" | ")[4] == f"{wanted:.2f}"


def test_a_claim_without_a_source_is_refused(tmp_path, monkeypatch):
    text = comparison_page.FEATURES.read_text()
    copy = tmp_path / "features.yaml"
    copy.write_text(text.replace(", source: docs/sharding.md", "", 1))
    monkeypatch.setattr(comparison_page, "FEATURES", copy)
    with pytest.raises(ValueError, match="ours: no source"):
        comparison_page.read_features()
