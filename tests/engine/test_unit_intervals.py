"""What a rank knows of its intervals of a unit: of each element, whether it may be quantised."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from frontier_llm.geometry.flat_layout import flat_layout
from frontier_llm.geometry.partition import Factors
from frontier_llm.protocols import ParameterRecord
from frontier_llm.sharding.unit import Unit
from tests.geometry.factors import any_factors

parameters = st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=5)


@given(parameters, any_factors(most=12))
def test_ranks_quantise_the_elements_of_matrices_and_no_others(
    shapes: list[tuple[int, bool]], factors: Factors
) -> None:
    records = [
        ParameterRecord(
            nn.Parameter(torch.ones(size)), "unit", (), "matrices" if matrix else "norms",
            counted=True, tensor_partial=False, tied=False,
        )
        for size, matrix in shapes
    ]  # fmt: skip
    layout = flat_layout(*zip(*shapes, strict=True), multiple=factors.data)
    is_matrix = torch.zeros(layout.size, dtype=torch.bool)
    for (size, matrix), start in zip(shapes, layout.starts, strict=True):
        is_matrix[start : start + size] = matrix

    for data_rank in range(factors.data):
        unit = Unit("unit", records, layout, factors, data_rank)
        for interval in (unit.params_interval, unit.grads_interval, unit.optimizer_interval):
            own = is_matrix[interval.start : interval.start + interval.length]
            count = unit.matrix_elements(interval)
            assert own[:count].all()
            assert not own[count:].any()
