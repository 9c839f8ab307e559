"""Tables of the planner page are current, and Frontier scales in them as published."""

import pytest

from docs.generate import frontier_tables, mt5_tables
from docs.generate.frontier_tables import CURVES, MICRO_BATCHES, scaling
from docs.generate.planner_page import PAGE
from frontier_llm.cli.experiments import composed
from frontier_llm.errors import ConfigError

POINTS = 0.03
"""Largest difference from a published efficiency."""


def strong_efficiency(model, micro_batch):
    """Return the efficiency of the last run; None if its samples are not divisible."""
    try:
        *_, last = scaling(CURVES[model], f"data.micro_batch={micro_batch}")
    except ConfigError:
        return None
    return last.efficiencies[1]


@pytest.mark.parametrize(("block", "table"), [
    ("frontier", frontier_tables.scaling_table),
    ("micro_batch", frontier_tables.micro_batch_table),
    ("mt5", mt5_tables.study_table),
])  # fmt: skip
def test_a_table_is_current(block, table):
    expected = "\n".join(table())
    assert f"<!-- {block} -->\n{expected}\n<!-- end of {block} -->" in PAGE.read_text()


@pytest.mark.parametrize("model", CURVES)
def test_scaling_on_frontier_is_near_the_published_efficiencies(model):
    *_, last = scaling(CURVES[model])
    for found, percent in zip(last.efficiencies, CURVES[model].published_percent, strict=True):
        assert found == pytest.approx(percent / 100, abs=POINTS)


@pytest.mark.parametrize("model", CURVES)
def test_only_the_micro_batch_of_the_experiment_explains_strong_scaling(model):
    published = CURVES[model].published_percent[1] / 100
    found = {size: strong_efficiency(model, size) for size in MICRO_BATCHES}
    near = [size for size, value in found.items() if value and abs(value - published) <= POINTS]
    assert near == [composed(f"experiment={CURVES[model].experiment}").data.micro_batch]


def test_the_bubble_alone_gives_the_predicted_efficiency_of_strong_scaling():
    rows = [row.strip("| ").split(" | ") for row in frontier_tables.micro_batch_table()][2:]
    compared = [row for row in rows if len(row) == 8]
    assert len(compared) == len(rows) - 1
    for row in compared:
        bubble, predicted = (float(cell.rstrip("%")) for cell in row[3:5])
        assert predicted == pytest.approx(bubble, abs=2)


@pytest.mark.parametrize("model", CURVES)
def test_the_last_runs_fit_in_memory(model):
    *_, last = scaling(CURVES[model])
    assert last.runs[1].refused is None
