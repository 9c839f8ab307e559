"""No queue of a device blocks the messages between stages, in a model of devices."""

import random
from collections.abc import Callable, Hashable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.config.parallel import ScheduleName
from frontier_llm.geometry.pipeline_schedule import Schedule, forward_actions, make_schedule
from frontier_llm.geometry.stage_messages import programs
from tests.covering import covering
from tests.parallel.device_model import LAUNCH_LIMIT, Device, simulate
from tests.parallel.stage_operations import Job, posted_ahead
from tests.properties import examples

CHUNKS: dict[ScheduleName, tuple[int, ...]] = {
    "1f1b": (1,), "zb_h1": (1,), "interleaved": (2, 3, 4), "zb_v": (2,), "v_half": (2,),
}  # fmt: skip
STAGES = (2, 3, 4, 8, 16)
QUEUES = [(1, False), (8, False), (4, True), (8, True), (1, True)]
"""Hardware queues of a device, and whether they run in order: CUDA with one queue and with eight,
HIP with 4 and with 8, and the strictest of all, where a rank does one thing at a time."""
EIGHT = [(8, False), (8, True)]
"""Kinds that run in exhaustive tests only: fewer queues are stricter."""
NAMES = [f"{'HIP' if in_order else 'CUDA'} {count}" for count, in_order in QUEUES]


def jobs(name: ScheduleName, stages: int, chunks: int, width: int = 1) -> Iterator[Job]:
    """Yield a training step and an evaluation."""
    schedule = make_schedule(name, stages, chunks, 2 * stages + 1, 0, False)
    placement = schedule.placement
    yield Job(placement, programs(placement, schedule.actions), width=width)
    forward = [forward_actions(placement, stage, 2 * stages + 1) for stage in range(stages)]
    yield Job(placement, programs(placement, forward), width=width)


def any_map(queues: int, seed: int) -> Callable[[int, Hashable], int]:
    """Return a random map of the streams of all ranks to hardware queues."""
    draws, drawn = random.Random(seed), {}

    def queue(rank: int, stream: Hashable) -> int:
        return drawn.setdefault((rank, stream), draws.randrange(queues))

    return queue


@pytest.mark.parametrize(
    ("queues", "in_order"),
    [
        pytest.param(*kind, marks=[pytest.mark.exhaustive] if kind in EIGHT else [])
        for kind in QUEUES
    ],
    ids=NAMES,
)
@pytest.mark.parametrize("name", covering(CHUNKS, ["1f1b", "zb_h1", "v_half"]))
def test_no_map_of_streams_to_queues_blocks(
    name: ScheduleName, queues: int, in_order: bool
) -> None:
    for stages in STAGES:
        for chunks in CHUNKS[name][: 1 if stages > 4 else None]:
            for job in jobs(name, stages, chunks, width=2 if stages == 2 else 1):
                listed = job.operations()
                for seed in range(1 if queues == 1 or stages > 8 else 4):
                    device = Device(
                        any_map(queues, seed), in_order, eager=bool(seed % 2),
                        launch_limit=None if seed else LAUNCH_LIMIT, is_lazy=not seed,
                    )  # fmt: skip
                    assert simulate(listed, device).waiting == {}, (stages, chunks, seed)


@examples(25)
@given(st.data())
def test_any_schedule_ends_where_a_rank_does_one_thing_at_a_time(data: st.DataObject) -> None:
    """Then it ends on any device, whose rules are all weaker."""
    name = data.draw(st.sampled_from(list(CHUNKS)))
    chunks = data.draw(st.integers(2, 6)) if name == "interleaved" else CHUNKS[name][0]
    stages, micro_batches = data.draw(st.integers(2, 16)), data.draw(st.integers(1, 24))
    waiting, recomputes = data.draw(st.integers(0, 4)), data.draw(st.booleans())
    schedule = make_schedule(name, stages, chunks, micro_batches, waiting, recomputes)
    job = Job(schedule.placement, programs(schedule.placement, schedule.actions))
    strictest = Device(lambda *_: 0, in_order=True, launch_limit=1, is_lazy=True)
    assert simulate(job.operations(), strictest).waiting == {}


def _ahead(schedule: Schedule, count: int, *, directions: bool = True) -> Job:
    placement = schedule.placement
    changed = posted_ahead(placement, programs(placement, schedule.actions), count)
    return Job(placement, changed, directions=directions)


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_receives_that_are_posted_ahead_are_found(name: ScheduleName, stages: int) -> None:
    """Two block one queue of CUDA, one blocks some of HIP; none blocks, if all share a queue."""
    schedule = make_schedule(name, stages, CHUNKS[name][0], 2 * stages, 0, False)
    listed = [_ahead(schedule, count).operations() for count in range(3)]
    assert simulate(listed[2], Device(lambda *_: 0)).waiting
    for count in (1, 2):
        devices = [Device(any_map(4, seed), in_order=True) for seed in range(6)]
        assert any(simulate(listed[count], device).waiting for device in devices), count
    assert simulate(listed[0], Device(lambda *_: 0, in_order=True)).waiting
    assert simulate(_ahead(schedule, 1, directions=False).operations(), Device()).waiting


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_first_message_between_two_stages_cannot_be_posted_ahead(
    name: ScheduleName, stages: int
) -> None:
    """Each host then waits for the other one in the creation of another communicator."""
    schedule = make_schedule(name, stages, CHUNKS[name][0], 2 * stages, 0, False)
    assert simulate(_ahead(schedule, 2).operations(), Device(is_lazy=True)).waiting
    assert not simulate(_ahead(schedule, 2).operations(), Device()).waiting


@pytest.mark.parametrize("layers", [4, 20])
def test_a_full_launch_queue_blocks_stages_that_create_communicators(layers: int) -> None:
    """A stage with more layers cannot launch its backward pass, which the other one waits for."""
    schedule = make_schedule("1f1b", 2, 1, 8, 0, False)
    job = Job(schedule.placement, _ahead(schedule, 2).programs, layers=layers, directions=True)
    listed = [
        [
            one._replace(communicator=one.communicator if one.stream == (1, 0) else None)
            for one in of_rank
        ]
        for of_rank in job.operations()
    ]  # an evaluation has sent messages to later stages
    run = simulate(listed, Device(launch_limit=LAUNCH_LIMIT, is_lazy=True))
    assert bool(run.waiting) is (layers == 20)


@pytest.mark.parametrize("name", covering(CHUNKS, ["1f1b", "zb_h1", "v_half"]))
def test_hardly_any_time_is_lost_in_shared_queues(name: ScheduleName) -> None:
    """Beside a device with a queue per stream, where each direction has a communicator."""
    for stages in (2, 4, 8):
        schedule = make_schedule(name, stages, CHUNKS[name][0], 4 * stages, 0, False)
        best = simulate(_ahead(schedule, 2).operations(), Device()).seconds
        job = Job(schedule.placement, programs(schedule.placement, schedule.actions))
        listed = job.operations()
        seconds = [
            simulate(listed, Device(any_map(queues, 1), in_order)).seconds / best
            for queues, in_order in QUEUES
        ]
        one_queue, eight, *in_order = seconds
        assert one_queue < 1.06, (stages, seconds)
        assert eight < 1.02, (stages, seconds)
        assert max(in_order) < 1.10, (stages, seconds)
