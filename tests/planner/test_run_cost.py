"""The cost of a run follows from the step time, the tokens and the figures of the cluster."""

import pytest

from frontier_lab.planning.run_cost import run_cost
from frontier_llm.planner.estimate import estimate
from tests.planner.layouts import make

OPERATION = (
    "cluster.operation.node_watts=1000",
    "cluster.operation.node_hours_per_failure=500",
    "checkpoint.every_steps=100",
)


def test_costs_follow_from_the_seconds_of_a_step():
    found = estimate(make("checkpoint=lazy", *OPERATION, ranks=8, ranks_per_node=4))
    step_tokens = found.tokens_per_second * found.time.seconds
    cost = run_cost(found, tokens=7.5e6 * step_tokens)
    assert cost.steps == 7_500_000
    hours = 7.5e6 * found.time.seconds / 3600
    assert cost.days == pytest.approx(hours / 24)
    assert cost.node_hours == pytest.approx(2 * hours)
    assert cost.megawatt_hours == pytest.approx(2 * hours * 1000 / 1e6)
    assert cost.interruptions == pytest.approx(2 * hours / 500)
    lost_steps = cost.interruptions * 50
    assert cost.lost_days == pytest.approx(lost_steps * found.time.seconds / 86400)
    assert cost.checkpoint_share == found.time.parts["checkpoint"] / found.time.seconds


def test_a_part_of_a_step_is_a_step():
    assert run_cost(estimate(make()), tokens=1).steps == 1


def test_what_the_cluster_file_lacks_is_unknown():
    found = estimate(make("cluster=polaris_a100_40g", "checkpoint=lazy"))
    cost = run_cost(found, 1e9)
    assert (cost.megawatt_hours, cost.interruptions, cost.lost_days) == (None, None, None)


def test_without_checkpoints_the_lost_work_is_not_given():
    cost = run_cost(estimate(make("checkpoint=off", *OPERATION[:2])), 1e9)
    assert cost.interruptions is not None
    assert cost.lost_days is None
