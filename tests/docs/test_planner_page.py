"""Tables of the planner page are current, and Frontier scales in them as published."""

import pytest

from docs.generate import planner_page
from docs.generate.blocks import ROOT
from docs.generate.planner_page import CURVES, PER_NODE, scaling
from docs.generate.predictions import predict
from frontier_llm.cli.experiments import composed
from frontier_llm.errors import ConfigError

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "planner.md"
POINTS = 0.03
"""Largest difference from a published efficiency."""


def strong_efficiency(model, micro_batch):
    """Return the efficiency of the last run; None if its samples are not divisible."""
    try:
        _, last = scaling(CURVES[model].ends, f"data.micro_batch={micro_batch}")
    except ConfigError:
        return None
    return last.efficiencies[1]


def experiment_estimate(name, *overrides):
    config = composed(f"experiment={name}", *overrides)
    return predict(config, PER_NODE * (config.launch.nodes or 1))


@pytest.mark.exhaustive  # the generator of the page checks them too
def test_the_table_of_scaling_is_current():
    expected = "\n".join(planner_page.scaling_table())
    assert f"<!-- frontier -->\n{expected}\n<!-- end of frontier -->" in PAGE.read_text()


@pytest.mark.parametrize("model", CURVES)
def test_scaling_on_frontier_is_near_the_published_efficiencies(model):
    _, last = scaling(CURVES[model].ends)
    for found, percent in zip(last.efficiencies, CURVES[model].published_percent, strict=True):
        assert found == pytest.approx(percent / 100, abs=POINTS)


@pytest.mark.parametrize("model", CURVES)
def test_only_the_micro_batch_of_the_experiment_explains_strong_scaling(model):
    published = CURVES[model].published_percent[1] / 100
    found = {size: strong_efficiency(model, size) for size in (1, 2, 4, 8)}
    near = [size for size, value in found.items() if value and abs(value - published) <= POINTS]
    assert near == [composed(f"experiment={CURVES[model].experiment}").data.micro_batch]


@pytest.mark.parametrize(("model", "micro_batch", "percent"), [
    ("175B", 4, 90.0), ("175B", 2, 94.7), ("1T", 4, 86.8), ("1T", 2, 92.8),
])  # fmt: skip
def test_the_bubble_alone_gives_the_predicted_efficiency_of_strong_scaling(
    model, micro_batch, percent
):
    """M micro-batches on S stages take M + S - 1 slots (Narayanan et al., SC'21)."""
    curves = CURVES[model]
    config = curves.config()
    stages = config.parallel.pipeline
    replicas = [ranks // (config.parallel.tensor * stages) for ranks in curves.ends.ranks]
    first, last = (config.data.global_batch / micro_batch / number for number in replicas)
    bubble = (1 + (stages - 1) / first) / (1 + (stages - 1) / last)
    assert 100 * bubble == pytest.approx(percent, abs=0.05)
    assert strong_efficiency(model, micro_batch) == pytest.approx(bubble, abs=0.02)
    assert f"{percent}%" in PAGE.read_text()


@pytest.mark.parametrize("model", CURVES)
def test_the_last_runs_fit_in_memory(model):
    _, last = scaling(CURVES[model].ends)
    assert last.runs[1].refused is None


@pytest.mark.parametrize("name", ["mt5_7b", "mt5_xxl"])
def test_the_page_has_the_seconds_of_mt5_with_and_without_tensor_ranks(name):
    own = experiment_estimate(name)
    pure = experiment_estimate(name, "parallel.tensor=1", "sharding=zero1")
    page = PAGE.read_text()
    assert f"{pure.time.seconds:.2f} s instead of {own.time.seconds:.2f} s" in page


def test_pure_data_parallelism_fills_the_memory_as_the_page_says():
    pure = experiment_estimate("mt5_xxl", "parallel.tensor=1", "sharding=zero1")
    assert pure.refused is None
    assert pure.peak.total > 0.95 * 80 * 2**30
    for stage in (1, 2, 3):
        tensor = experiment_estimate("mt5_xxl", f"sharding=zero{stage}")
        assert tensor.peak.total < 0.5 * 80 * 2**30


@pytest.mark.parametrize("name", ["mt5_7b", "mt5_xxl"])
def test_pure_data_parallelism_is_faster_where_it_fits(name):
    for stage in (1, 2, 3):
        tensor = experiment_estimate(name, f"sharding=zero{stage}")
        pure = experiment_estimate(name, "parallel.tensor=1", f"sharding=zero{stage}")
        assert tensor.refused is None
        assert pure.refused or pure.time.seconds < tensor.time.seconds
