"""Weight gradients that layers add to the sums themselves, against those that autograd makes."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from frontier_llm.launch.world import World
from frontier_llm.sharding import unit_gradients
from tests.covering import exhaustive
from tests.ranks import run_ranks
from tests.trainer.rig import make_rig
from tests.trainer.test_parity import first_gradients
from tests.values import TINY_T5, tiny_values

pytestmark = pytest.mark.slow

SEQUENCE = ["parallel.tensor=2", "parallel.sequence=true"]
INTERLEAVED = ["parallel.pipeline=2", "parallel.chunks=2"]
UNTIED = ["model.tied=false", "model.kv_heads=2", "model.activation=swiglu", "model.bias=false"]
ZERO2_BF16 = ["sharding=zero2", "collectives.grads_format=bf16"]
QUANTISED = ["sharding=zero3", "collectives=zeropp"]
LAYOUTS = {
    "one_process": (1, []),
    "untied": (1, UNTIED),
    "sequence_recompute": (2, [*SEQUENCE, "recompute=full"]),
    "selective": (1, ["recompute=selective"]),
    "interleaved_zero1": (4, [*INTERLEAVED, "sharding=zero1", *UNTIED]),
    "zero2": (2, ["sharding=zero2"]),
    "zero2_bf16_messages": (2, ZERO2_BF16),
    "zero3": (2, [*UNTIED, "sharding=zero3"]),
    "zero3_quantised": (2, QUANTISED),
    "t5_recompute": (2, [*TINY_T5, "recompute=full", "sharding=zero2"]),
    "t5_pipeline": (2, [*TINY_T5, "parallel.pipeline=2"]),
}


def train(world: World, values: dict[str, Any], precision: str) -> dict[str, Any]:
    """Train two steps; count the products, and the matrices that autograd made a gradient of."""
    with mock.patch.object(
        unit_gradients, "accumulate_product", wraps=unit_gradients.accumulate_product
    ) as product:
        rig = make_rig(world, values, precision)
        made: set[str] = set()

        def note(name: str) -> Any:
            return lambda gradient: None if gradient is None else made.add(name)

        for record in rig.model.records:
            record.parameter.register_hook(note(record.name))
        first = rig.train(1)
        found = first_gradients(rig)
        results = first + rig.train(1, first=1)
    micro_batches = len(rig.batches(0))
    matrices = {r.name for r in rig.model.records if r.parameter.dim() == 2}
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "gradients": found,
        "products": product.call_count / 2 / micro_batches,
        "matrices": matrices,
        "made": made & matrices,
    }


def looked_up(names: set[str]) -> set[str]:
    """Return the tables among these matrices, whose gradients autograd makes."""
    tables = ("embedding.", "positions", "relative")
    return {name for name in names if any(table in name for table in tables)}


COVERED = (
    "sequence_recompute", "zero2", "zero3", "selective", "t5_pipeline", "one_process",
)  # fmt: skip
"""Layouts whose parts are those of others, or of the same with another format."""
CASES = [
    *((name, "fp32") for name in LAYOUTS if name not in COVERED),
    *exhaustive(*((name, "fp32") for name in COVERED if name != "sequence_recompute")),
    ("untied", "bf16"),
    *(
        pytest.param(name, "bf16", marks=pytest.mark.exhaustive)
        for name in ("sequence_recompute", "zero2_bf16_messages")
    ),
]


@pytest.mark.parametrize(("layout", "precision"), CASES)
def test_fused_gradients_are_those_of_autograd(layout: str, precision: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    fused, apart = (
        run_ranks(
            train, ranks, tiny_values(*overrides, f"sharding.fused_gradients={fuse}"), precision
        )
        for fuse in ("true", "false")
    )
    tolerance = 1e-6 if precision == "fp32" else 2**-8
    for mine, theirs in zip(fused, apart, strict=True):
        assert theirs["products"] == 0
        assert theirs["made"] == theirs["matrices"]
        assert mine["made"] == looked_up(mine["matrices"])
        assert mine["products"] == len(mine["matrices"] - mine["made"])
        np.testing.assert_allclose(mine["losses"], theirs["losses"], rtol=tolerance)
        np.testing.assert_allclose(mine["norms"], theirs["norms"], rtol=tolerance)
        for name, (_, pieces) in theirs["gradients"].items():
            for (_, ours), (_, expected) in zip(mine["gradients"][name][1], pieces, strict=True):
                here = ~np.isnan(expected)
                scale = np.linalg.norm(expected[here])
                assert np.linalg.norm((ours - expected)[here]) <= tolerance * scale, name


def overflow(world: World, fused: bool) -> list[tuple[bool, float]]:
    """Train in fp16 with a loss scale that is too large, until updates are not skipped."""
    rig = make_rig(
        world, tiny_values("precision=fp16", f"sharding.fused_gradients={fused}"), "fp16"
    )
    results = rig.train(4)
    assert all(torch.isfinite(p).all() for c in rig.model.chunks for p in c.parameters())
    return [(result.skipped, result.loss) for result in results]


def test_an_overflow_of_fp16_is_noticed() -> None:
    fused, apart = (run_ranks(overflow, 1, fuse)[0] for fuse in (True, False))
    assert [skipped for skipped, _ in fused] == [skipped for skipped, _ in apart]
    np.testing.assert_allclose([x for _, x in fused], [x for _, x in apart], rtol=1e-3)
