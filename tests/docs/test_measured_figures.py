"""Check that tables and charts of measured figures are as new as benchmarks/results."""

import json

import pytest

from docs.generate import benchmark_charts, comparison_page, measured_tables
from docs.generate.results import RESULTS, sharding_case


@pytest.mark.parametrize("page", [measured_tables, comparison_page])
def test_the_tables_are_current(page, capsys):
    assert page.main([]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", benchmark_charts.CHARTS)
def test_the_chart_is_current(name):
    assert benchmark_charts.is_current(name), "python -m docs.generate.benchmark_charts --write"


def test_a_chart_of_other_data_is_stale(tmp_path, monkeypatch, capsys):
    for file in RESULTS.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    faults = json.loads((tmp_path / "faults.json").read_text())
    faults["rows"][0]["nodes_free_after"] = "99 s"
    (tmp_path / "faults.json").write_text(json.dumps(faults))
    monkeypatch.setattr(benchmark_charts, "RESULTS", tmp_path)
    assert benchmark_charts.main([]) == 1
    stale = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in stale] == ["faults.svg"]


def test_a_chart_shows_its_figures():
    drawn = benchmark_charts.draw("sharding_speed")
    rows = sharding_case(0, ranks=2, precision="bf16", link="1 Gbit/s")
    assert drawn.startswith("<?xml")
    assert "ours-zeropp+zeropp" in drawn
    assert f">{rows['ours-zeropp+zeropp']['tokens_per_second']}<" in drawn


def test_the_speeds_of_the_comparison_are_quotients_of_rows():
    rows = sharding_case(0, ranks=2, precision="bf16", link="1 Gbit/s")
    wanted = rows["ours-zero3"]["tokens_per_second"] / rows["fsdp"]["tokens_per_second"]
    (row,) = [line for line in comparison_page.table() if "ZeRO-3, 1 Gbit/s" in line]
    assert row.split(" | ")[4] == f"{wanted:.2f}"


def test_a_claim_without_a_source_is_refused(tmp_path, monkeypatch):
    text = comparison_page.FEATURES.read_text()
    copy = tmp_path / "features.yaml"
    copy.write_text(text.replace(", source: docs/sharding.md", "", 1))
    monkeypatch.setattr(comparison_page, "FEATURES", copy)
    with pytest.raises(ValueError, match="ours: no source"):
        comparison_page.read_features()
