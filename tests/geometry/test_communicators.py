"""Communicators per layout, and their buffers against sizes that users of NCCL have reported."""

import pytest

from frontier_llm.config.calibration import CalibrationConfig
from frontier_llm.geometry.communicators import (
    CONTEXT,
    NETWORK_BYTES,
    Communicator,
    communicators,
    tied_stages,
)
from frontier_llm.planner.memory import runtime_bytes, stage_memory
from frontier_llm.units import MIB
from tests.planner.layouts import make


def _created(*overrides, stage=0, **sizes):
    layout = make(*overrides, **sizes).layout
    return communicators(layout, stage, tied_stages(layout))


def test_an_all_to_all_of_8_h100_takes_what_was_reported():
    """NCCL issue #1685: 1.06 GB before the first all-to-all, 4.34 GB after it, 32 channels."""
    taken = Communicator("", 8, near=7).buffer_bytes(24) - Communicator("", 8).buffer_bytes(24)
    assert taken == pytest.approx(4.34e9 - 1.06e9, rel=0.01)


def test_a_second_neighbour_takes_what_was_reported():
    """NCCL issue #964: 544 MB in groups of 2 of 4 x A100, 688 MB in groups of 3 and of 4."""
    sizes = [Communicator("", ranks).buffer_bytes(10) for ranks in (1, 2, 3, 4)]
    assert sizes[0] == 0
    assert sizes[3] == sizes[2] == 2 * sizes[1]
    assert sizes[2] - sizes[1] == pytest.approx((688 - 544) * 1e6, rel=0.03)


def test_without_channels_communicators_take_no_device_memory():
    assert Communicator("", 8, near=3, far=4).buffer_bytes(0) == 0


def test_messages_to_other_nodes_share_their_buffers():
    one, many = (Communicator("", 1, far=ranks).buffer_bytes(8) for ranks in (1, 7))
    assert one == many == NETWORK_BYTES


def test_groups_of_one_rank_have_no_communicator():
    assert _created(ranks=1) == ()


PLACES = {
    "1f1b": [(1, 0), (1, 1), (1, 1), (1, 0)],
    "interleaved": [(1, 1), (1, 1), (1, 1), (1, 1)],
    "zb_v": [(1, 0), (1, 1), (1, 1), (1, 0)],
}
"""For each schedule and stage, its neighbours on its node and on other nodes. Two stages share a
node."""


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("schedule", PLACES)
def test_a_stage_exchanges_messages_in_one_communicator(schedule, stage):
    created = _created(
        "parallel.pipeline=4",
        f"parallel.chunks={1 if schedule == '1f1b' else 2}",
        f"parallel.schedule={schedule}",
        "model.layers=8",
        "model.tied=false",
        stage=stage,
    )
    of_stages = [c for c in created if c.near + c.far]
    assert of_stages == [Communicator("stages", 1, *PLACES[schedule][stage])]


def test_copies_on_all_stages_are_summed_in_the_group_of_stages():
    created = {c.name: c for c in _created("parallel.pipeline=2", "model.tied=true")}
    assert created["stages"] == Communicator("stages", 2, far=1)
    names = {c.name for c in _created("parallel.pipeline=4", "model.layers=8", "model.tied=true")}
    assert "copies of parameters on stages 0, 3" in names


@pytest.mark.parametrize("count", ["few", "one"])
def test_groups_of_all_ranks_share_a_communicator(count):
    overrides = ("sharding=zero2", "collectives=zeropp")
    all_ranks, hop = _created(*overrides, ranks=4)
    together = _created(*overrides, f"collectives.communicators={count}", ranks=4)
    assert all_ranks == Communicator("all ranks", 4)
    assert together == (hop._replace(name="all ranks"),)


def test_gloo_has_no_communicators():
    overrides = ("parallel.pipeline=4", "collectives.backend=gloo")
    assert _created(*overrides) == () != _created(overrides[0])


def test_the_plan_has_a_row_of_its_own():
    candidate = make("parallel.pipeline=2")
    calibration = candidate.config.cluster.device.calibration
    layout = candidate.layout
    planned = stage_memory(candidate, 0).by_category
    created = communicators(layout, 0, tied_stages(layout))
    buffers = sum(c.buffer_bytes(calibration.channels) for c in created)
    assert planned["communicators"] == buffers > 500 * MIB
    assert runtime_bytes(calibration, buffers).items() <= planned.items()


def test_a_cluster_file_without_channels_is_still_valid():
    values = {
        "products": {}, "attention_share": 1.0, "memory_share": 1.0, "kernel_us": 1.0,
        "hidden_share": 0.5, "reserved_gib": 1.5, "slack_share": 0.1, "source": "old",
    }  # fmt: skip
    old = CalibrationConfig.model_validate(values)
    assert Communicator("", 8).buffer_bytes(old.channels) == 0


@pytest.mark.parametrize("sharding", ["zero1", "mics"])
def test_context_ranks_exchange_in_a_communicator_of_their_own(sharding):
    """They are neighbours, and overlap with collectives of states, also of the same ranks."""
    cut = ("parallel.context=4", "data.sequence_length=64", f"sharding={sharding}")
    layout = make(*cut, "cluster=h100_8", ranks=16).layout
    listed = communicators(layout, 0, tied_stages(layout))
    (own,) = [group for group in listed if group.name == CONTEXT]
    assert (own.ring, own.near, own.far, own.exchanges) == (1, 3, 0, True)
    assert len({group.name for group in listed}) == len(listed)
    wide = make("parallel.context=16", "data.sequence_length=64", "cluster=h100_8", ranks=16).layout
    (far,) = [g for g in communicators(wide, 0, tied_stages(wide)) if g.name == CONTEXT]
    assert (far.near, far.far) == (3, 12)
