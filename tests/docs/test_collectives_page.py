"""docs/collectives.md says what conf/, geometry/ and the table of what is supported say."""

import pytest

from docs.generate.collectives_page import (
    SCHEMES,
    leaves_a_node,
    published,
    support,
    zero3_in_rings,
)

pytestmark = pytest.mark.slow


def test_volumes_by_hand():
    """4 nodes of 8 ranks: gradients in int4 each micro-batch, a refresh in int8 each step."""
    zero3, _, _, zeropp = SCHEMES
    for micro_batches in (1, 4, 16):
        rings = zero3_in_rings(micro_batches)
        assert rings == pytest.approx(3 * micro_batches * (1 - 1 / 32))
        # in the hops between nodes each of 8 ranks has an eighth of the parameters and gradients
        direct = micro_batches * 3 * (1 - 1 / 4)
        assert leaves_a_node(zero3, micro_batches) == pytest.approx(direct, rel=1e-3)
        by_hand = (0.25 * micro_batches + 0.5) * (1 - 1 / 4)
        assert leaves_a_node(zeropp, micro_batches) == pytest.approx(by_hand, rel=0.02)
        assert leaves_a_node(zeropp, micro_batches) < rings / 4, "ZeRO++ promises a quarter"
    assert leaves_a_node(zeropp, 4) < published(4)


def test_every_precision_preset_and_device_has_a_verdict():
    rows = [line.strip("| ").split(" | ") for line in support() if line.startswith("| ")][1:]
    found = {
        (precision, preset): signs
        for precision, presets, *signs in rows
        for preset in presets.split(", ")
    }
    assert len(found) == 24
    assert found["fp16", "`zeropp_feedback`"] == ["refused", "refused", "refused"]
    assert found["bf16", "`zeropp`"] == ["yes", "not run", "not run"]
