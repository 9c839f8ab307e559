"""The page of observations shows what the planner predicts."""

import pytest

from docs.generate import observations_page
from docs.generate.observations_page import Chart, Recomputation

pytestmark = pytest.mark.slow


def values(chart, name):
    """Return the percents of a line, in the order of its setting."""
    return list(chart.lines[name].values())


def test_a_sentence_gives_the_ends_of_each_line():
    chart = Chart("tensor size", {"a": {1: 30.0, 2: 25.0, 4: 20.25}, "b": {2: 1.0, 8: 2.0}})
    assert observations_page._sentence(chart) == (
        "Predicted by tensor size: 30.0% at 1 and 20.2% at 4 (a); 1.0% at 2 and 2.0% at 8 (b)."
    )


def test_the_sentence_of_recomputation_compares_speed_and_memory():
    rows = [Recomputation("1B", (30.0, 20.0), (12.0, 8.0))]
    assert "1.50 times as fast with 12.0 instead of 8.0 GiB (1B)" in (
        observations_page._recomputation_sentence(rows)
    )


def test_more_tensor_ranks_cost_speed():
    for name in (chart := observations_page.tensor()).lines:
        percents = values(chart, name)
        assert percents == sorted(percents, reverse=True)


@pytest.mark.exhaustive
def test_a_batch_that_grows_with_the_stages_keeps_more_of_the_speed():
    chart = observations_page.pipeline()
    fixed, grown = (values(chart, name) for name in chart.lines)
    assert fixed[0] == grown[0]
    assert all(more > less for more, less in zip(grown[1:], fixed[1:], strict=True))


@pytest.mark.exhaustive
def test_more_micro_batches_gain_until_the_batch_is_saturated():
    for name in (chart := observations_page.micro_batches()).lines:
        percents = values(chart, name)
        assert percents == sorted(percents)
        assert percents[1] / percents[0] > 1.4
        assert percents[-1] / percents[-2] < 1.06


@pytest.mark.exhaustive
def test_chunks_gain_most_with_few_micro_batches():
    chart = observations_page.chunks()
    gains = [values(chart, name)[-1] / values(chart, name)[0] for name in chart.lines]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] > 1


@pytest.mark.exhaustive
def test_the_gain_of_flash_attention_grows_with_the_sequence():
    chart = observations_page.attention()
    flash, plain = (values(chart, name) for name in chart.lines)
    gains = [with_flash / without for with_flash, without in zip(flash, plain, strict=True)]
    assert gains == sorted(gains)
    assert gains[0] > 1


def test_a_layout_that_does_not_fit_is_not_shown():
    with pytest.raises(ValueError, match="memory: stage 0"):
        observations_page._run((*observations_page.OF_175B, "parallel.pipeline=8"), 32)


def test_the_states_of_a_parameter_take_18_bytes():
    for line in list(observations_page.memory_table())[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        parameters, together = float(cells[1].rstrip("B").replace(",", "")), cells[5]
        assert float(together.rstrip(" GB").replace(",", "")) == pytest.approx(
            18 * parameters, rel=0.02
        )
