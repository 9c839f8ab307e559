"""What the charts do to numbers before they draw them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.telemetry.figures import _smoothed


@given(st.lists(st.floats(0.1, 20), max_size=500))
def test_a_point_becomes_the_mean_of_its_surroundings(values: list[float]) -> None:
    reach, last = len(values) // 100, len(values) - 1
    for index, (step, smooth) in enumerate(_smoothed(list(enumerate(values)))):
        assert step == index
        around = min(reach, index, last - index)
        window = values[index - around : index + around + 1]
        assert smooth == pytest.approx(sum(window) / len(window))
