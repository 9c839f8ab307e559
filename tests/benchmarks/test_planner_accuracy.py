"""The planner keeps to published figures, with one set of constants a device."""

import pytest

from benchmarks.planner_accuracy import MEAN_WANTED, WORST_WANTED, errors, predict_all, to_json
from benchmarks.published.fit import fit
from benchmarks.published.predict import composed, constants_of, predict
from benchmarks.published.published import AMSP, rows
from docs.generate.planner_page import PAGE, validation
from frontier_llm.calibration.products import Sample, fit_curve


@pytest.fixture(scope="module")
def predictions():
    return predict_all()


def test_errors_are_within_what_is_promised(predictions):
    mean, worst = errors(predictions)
    assert mean <= MEAN_WANTED
    assert worst <= WORST_WANTED


def test_every_figure_has_one_reading_that_counts(predictions):
    counted = [p.row.table + p.row.name for p in predictions if p.row.counts]
    assert len(counted) == len(set(counted)) == 7 + 3 + 16
    assert {p.row.table + p.row.name for p in predictions} == set(counted)


def test_a_rows_figures_are_those_of_its_estimate(predictions):
    for prediction in predictions:
        values = to_json(prediction)
        assert values["error"] == pytest.approx(values["predicted"] / values["published"] - 1)
        assert abs(values["error_beyond_rounding"]) <= abs(values["error"])


def test_the_orders_of_amsp_are_kept(predictions):
    """Who is faster than whom is what a planner is for."""
    by_name = {p.row.name: p.predicted for p in predictions if p.row.counts}
    assert by_name["7B on 1024, AMSP"] > by_name["7B on 1024, ZeRO-1"]
    assert by_name["7B on 1024, MiCS"] > by_name["7B on 1024, ZeRO++ (hpZ)"]
    assert by_name["13B on 1024, ZeRO++ (hpZ)"] > by_name["13B on 1024, ZeRO-3"]


def test_fitting_recovers_the_constants_that_made_the_figures():
    table = [row for row in rows() if row.table == AMSP and row.counts][:6]
    true = constants_of(composed(table[0].overrides)) | {"tflops": 0.6}
    made = []
    for row in table:
        figure = predict(row, true).predicted
        made.append(type(row)(**{**vars(row), "published": figure, "rounding": 0.0}))
    start = {**true, "tflops": 0.75}
    assert fit(made, ["tflops"], start)["tflops"] == pytest.approx(0.6, rel=0.02)


def test_the_curve_of_products_is_found_again():
    shapes = [(256, 64, 192), (256, 256, 1024), (1024, 512, 2048), (128, 4096, 64)]
    samples = [
        Sample(m, k, n, 2e-12 * (m * k * n + 40 * (m * k + k * n + m * n)) / 0.3)
        for m, k, n in shapes
    ]
    assert fit_curve(samples) == pytest.approx((0.3, 40))


def test_the_table_of_the_page_is_current():
    lines = "".join(f"{line}\n" for line in validation())
    assert lines in PAGE.read_text()
