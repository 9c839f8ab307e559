"""How often a stage gathers its units; that ranks do gather as often: test_state_accounting.py."""

import pytest

from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.units import gathers_by_pass
from tools.compose import compose


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
                f"sharding.units_in_flight={in_flight}",
            ]
        )
    )
    counts = gathers_by_pass(config, stage, Factors(2, 2, 2, 2), micro_batches=4)
    assert sum(sum(both) for both in counts.values()) == expected
