"""Context ranks divide what a step keeps, and hold the keys and values of a layer besides."""

import pytest

from frontier_llm.planner.block import stage_activations
from tests.planner.layouts import make
from tests.planner.step_peak import measure_peak
from tests.ranks import run_ranks
from tests.values import tiny_values

TOKENS = 512
MODEL = (
    "model.hidden=256", "model.layers=8", "model.heads=8", "model.kv_heads=2", "model.bias=false",
    "model.positions=rotary", f"data.sequence_length={TOKENS}", "data.micro_batch=1",
    "parallel.pipeline=1", "sharding=replicated", "recompute=none",
)  # fmt: skip


@pytest.mark.slow
def test_a_measured_step_needs_its_share_and_the_keys_of_a_layer():
    measured, planned = {}, {}
    for context in (1, 2, 4):
        cut = (*MODEL, f"parallel.context={context}", f"data.global_batch={4 // context}")
        measured[context] = max(run_ranks(measure_peak, 4, tiny_values(*cut), 3))
        each = make(*cut, "cluster=cpu_laptop", "precision=fp32", ranks=4)
        planned[context] = stage_activations(each, 0, each.stages.kinds[0])
    gathered = 2 * 2 * 32 * TOKENS * 4  # keys and values, two heads of 32 fp32 elements
    for context in (2, 4):
        share = measured[1] / context + gathered
        assert measured[context] == pytest.approx(share, rel=0.03)
        assert planned[context].kept == planned[1].kept / context
        assert planned[context].kept + gathered == pytest.approx(measured[context], rel=0.05)
        assert planned[context].logits == planned[1].logits / context
        most = planned[context].kept + planned[context].working
        assert measured[context] < most < 1.1 * measured[context]
    assert planned[1].kept == pytest.approx(measured[1], rel=0.05)


def test_the_largest_sample_decides_what_a_cut_needs():
    """On a GPU, blocks of 1024 queries have a mask of 8 + 1 + 2 bytes for each of all keys."""
    long = ("model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.ffn=64",
            "parallel.pipeline=1", "data.sequence_length=16384", "data.global_batch=8")  # fmt: skip
    working = {}
    for context, samples in ((1, 2), (2, 1), (2, 2), (4, 2)):
        each = make(
            *long, f"parallel.context={context}", f"data.micro_batch={samples}", ranks=4,
            ranks_per_node=4,
        )  # fmt: skip
        working[context, samples] = stage_activations(each, 0, each.stages.kinds[0]).working
    # all heads of a block; of two heads what is received of each sample, a copy, and gradients
    bytes_of = {samples: 2 * (4 + 2 * (samples + 2)) * 16 * 2 for samples in (1, 2)}
    for (context, samples), size in working.items():
        if context > 1:
            assert size == 16384 * (bytes_of[samples] + 1024 * (8 + 1 + 2))
    assert working[1, 2] < working[2, 2]
