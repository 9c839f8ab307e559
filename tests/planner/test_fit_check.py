"""What cannot fit is refused before it starts, with a change that does fit."""

import re

import pytest

from frontier_lab.commands.dry_run import candidate_of
from frontier_llm.cli.compose import groups
from frontier_llm.cli.experiments import composed
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import budget_bytes
from frontier_llm.planner.fit_check import check_fits
from frontier_llm.planner.memory import stages_memory
from tests.patience import count_calls

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", groups()["experiment"])
def test_every_experiment_fits_its_cluster(name):
    candidate = candidate_of(name)
    peak = check_fits(candidate)
    assert peak.total == max(memory.total for memory in stages_memory(candidate))
    assert peak.total <= budget_bytes(candidate)


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        (["experiment=amsp_llama_13b", "sharding=zero1"], 64),
        (["experiment=amsp_llama_7b", "sharding=amsp_1_1_8", "data.micro_batch=8"], 64),
        (["experiment=frontier_22b", "parallel.pipeline=2"], 16),
    ],
)
def test_the_advice_is_a_change_that_fits(overrides, ranks):
    with pytest.raises(ConfigError) as caught:
        check_fits(Candidate.of(composed(*overrides), ranks, 8))
    error = caught.value
    assert error.key == "plan"
    assert "GiB" in error.got
    named = [text.split() for text in re.split(r" \([^)]*\)(?:, or )?", error.todo)[:-1]]
    assert 1 <= len(named) <= 2
    for words in named:
        changes = [word for word in words if "=" in word]
        assert changes
        check_fits(Candidate.of(composed(*overrides, *changes), ranks, 8))


def test_where_no_single_change_fits_it_says_so():
    config = composed(
        "model=gpt_1t", "cluster=a100_80g", "parallel.pipeline=1", "data.global_batch=32"
    )
    with pytest.raises(ConfigError, match="no single change fits"):
        check_fits(Candidate.of(config, 8, 8))


def test_a_check_costs_a_run_nothing():
    candidate = Candidate.of(composed(), 4, 4)
    assert count_calls(lambda: check_fits(candidate)) < 20_000  # milliseconds
