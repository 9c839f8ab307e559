"""The comparison of a plan with its run, as text, as values and in the report."""

import pytest

from frontier_llm.telemetry.report_sections import plan_section
from frontier_llm.telemetry.summary import PlanRow, RunSummary
from frontier_llm.trainer.callbacks.measurements import PHASES, describe_rows, values_of

ROWS = [
    PlanRow(name="parameters", unit="bytes", predicted=2048, measured=2048),
    PlanRow(name="peak of the device", unit="bytes", predicted=4096, measured=5120),
    PlanRow(name="passes", unit="seconds", predicted=0.5, measured=0.25),
    PlanRow(name="update", unit="seconds", predicted=None, measured=0.01),
]


def test_every_part_of_a_prediction_is_compared_once():
    names = [name for parts in PHASES.values() for name in parts]
    assert len(names) == len(set(names))
    parts = {"compute", "tensor", "exchange", "bubble", "gather_params", "reduce_grads"}
    assert set(names) == parts | {"host", "refresh_params", "reduce_states", "update"}


def test_the_comparison_in_words_and_values():
    memory, seconds = describe_rows(ROWS)
    assert memory.startswith("parameters 2.00 KiB as planned, ")
    assert "peak of the device 5.00 KiB (planned 4.00 KiB)" in memory
    assert seconds == "passes 250 ms (planned 500 ms), update 10 ms"
    uncalibrated = [row.model_copy(update={"predicted": None}) for row in ROWS]
    memory, seconds = describe_rows(uncalibrated)
    assert memory == "parameters 2.00 KiB, peak of the device 5.00 KiB"
    assert seconds == "passes 250 ms, update 10 ms, not calibrated: frontier-llm calibrate"
    assert values_of(ROWS)["passes"] == {"predicted": 0.5, "measured": 0.25}
    assert values_of([]) is None


@pytest.mark.parametrize(("rows", "sections"), [(ROWS, 1), ([], 0)])
def test_the_report_shows_the_comparison_where_there_is_one(rows, sections):
    found = list(plan_section(RunSummary(plan=rows)))
    assert len(found) == sections
    if rows:
        assert "+25%" in found[0]
        assert "none" in found[0]
        assert "unknown" in found[0]
