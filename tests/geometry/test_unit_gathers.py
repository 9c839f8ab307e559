"""How often a stage gathers its units; that ranks do gather as often: test_state_accounting.py."""

import pytest

from frontier_lab.planning.unit_gathers import count_gathers
from frontier_llm.cli.compose import compose
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.resolved import ResolvedLayout


@pytest.mark.parametrize(("stage", "in_flight", "expected"), [(1, 1, 45), (1, 2, 42), (2, 2, 38)])
def test_layers_that_are_needed_again_soon_are_not_gathered_again(stage, in_flight, expected):
    """Of 6 layers, 4 micro-batches, 2 passes: 48 gathers, and less at the turns between passes."""
    config = RunConfig.model_validate(
        compose(
            [
                "model=gpt_tiny",
                "model.layers=24",
                "parallel.pipeline=4",
                "launch.ranks=8",
                "data.global_batch=8",
                "data.micro_batch=1",
                f"sharding.units_in_flight={in_flight}",
            ]
        )
    )
    layout = ResolvedLayout.resolve(config, 8, 8).with_factors(Factors(2, 2, 2, 2))
    counts = count_gathers(layout, stage)
    assert sum(sum(both) for both in counts.values()) == expected
