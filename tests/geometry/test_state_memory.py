"""Bytes of model states a rank, against the papers' 2/p + 2/g + 12/o."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.cli.experiments import composed
from frontier_llm.geometry.flat_layout import flat_layout
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.state_memory import needs_master, prefetch_window, rank_state_bytes
from tests.geometry.factors import any_factors

ADAMW = composed("experiment=frontier_22b").optimizer
SCHEMES = {  # 18 bytes a parameter: 2 to compute with, 4 accumulated, 4 of master, 8 of moments
    "replicated": ((1, 1, 1), 18),
    "zero1": ((1, 1, 8), 2 + 4 + 12 / 8),
    "zero2": ((1, 8, 8), 2 + 16 / 8),
    "zero3": ((8, 8, 8), 18 / 8),
    "mics": ((4, 4, 4), 18 / 4),
    "zeropp": ((4, 8, 8), 2 / 4 + 16 / 8),
}


def state_bytes(elements: int, factors: Factors, compute_bytes: int, *, master: bool):
    """Return the bytes of AdamW's states for one matrix with so many elements."""
    units = [(flat_layout([elements], [True]), 1)]
    return rank_state_bytes(ADAMW, units, factors, compute_bytes, None, master=master)


@pytest.mark.parametrize("name", SCHEMES)
def test_bytes_a_parameter_in_mixed_precision(name):
    numbers, wanted = SCHEMES[name]
    factors = Factors(*numbers, 8)
    assert needs_master(compute_bytes=2)
    stored = state_bytes(800, factors, compute_bytes=2, master=True)
    assert sum(stored.values()) == 800 * wanted


@given(any_factors(), st.integers(1, 1000))
def test_each_state_is_cut_by_its_own_factor(factors, elements):
    size = factors.padded(elements)
    stored = state_bytes(size, factors, compute_bytes=2, master=True)
    assert stored == {
        "parameters": 2 * size // factors.params,
        "gradients": 4 * size // factors.grads,
        "master": 4 * size // factors.optimizer,
        "moments": 8 * size // factors.optimizer,
    }


def test_fp32_parameters_are_the_master_weights():
    assert not needs_master(compute_bytes=4)
    stored = state_bytes(800, Factors(1, 2, 8, 8), compute_bytes=4, master=False)
    assert stored == {"parameters": 3200, "gradients": 1600, "master": 0, "moments": 800}


def test_units_in_flight_are_large_ones_and_small_between_them():
    uses = [("a", False), ("norm", False), ("b", False), ("b", True), ("norm", True), ("c", True)]
    assert list(prefetch_window(uses, {"norm"}, 1)) == uses[:2]
    assert list(prefetch_window(uses, {"norm"}, 2)) == uses[:3], "no unit counts twice"
    assert list(prefetch_window(uses, {"norm"}, 3)) == [*uses[:3], uses[5]]
