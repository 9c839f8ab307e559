"""What the charts do to numbers before they draw them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.telemetry.figures import _smoothed, optimizer_figure
from frontier_llm.telemetry.history import History


@given(st.lists(st.floats(0.1, 20), max_size=500))
def test_a_point_becomes_the_mean_of_its_surroundings(values: list[float]) -> None:
    reach, last = len(values) // 100, len(values) - 1
    for index, (step, smooth) in enumerate(_smoothed(list(enumerate(values)))):
        assert step == index
        around = min(reach, index, last - index)
        window = values[index - around : index + around + 1]
        assert smooth == pytest.approx(sum(window) / len(window))


def test_powers_of_ten_on_an_axis_are_plain_numbers() -> None:
    rows = [{"step": i, "grad_norm": 10.0 ** (i % 4), "learning_rate": 1e-3} for i in range(1, 9)]
    svg = optimizer_figure(History(rows))
    assert "mathdefault" not in svg
    assert ">100<" in svg
