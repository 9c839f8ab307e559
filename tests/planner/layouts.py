"""Small candidates for the tests of this folder."""

from frontier_llm.config import decode
from frontier_llm.planner.candidate import Candidate
from tests.values import tiny_values


def make(*overrides, ranks=8, ranks_per_node=4):
    """Lay out the tiny model on a described A100 cluster."""
    values = tiny_values("cluster=a100_80g", "precision=bf16", *overrides)
    return Candidate.of(decode(values), ranks, ranks_per_node)
