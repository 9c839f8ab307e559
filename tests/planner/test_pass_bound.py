"""The lower bound on a pipeline's seconds is one."""

from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.planner.timeline import ActionSeconds, Send, least_pass_seconds, pass_seconds
from tests.planner.layouts import make

SPLIT = {"1f1b": (1,), "interleaved": (2, 3), "zb_h1": (1,), "zb_v": (2,), "v_half": (2,)}
"""Chunks per stage of the schedules."""
STAGES = 4


def _layout(name, chunks, waiting, micro_batches, recompute="none"):
    return make(
        f"parallel.pipeline={STAGES}", f"parallel.chunks={chunks}", f"parallel.schedule={name}",
        f"parallel.waiting_weights={waiting}", f"data.global_batch={2 * micro_batches}",
        "data.micro_batch=1", "model.layers=12", f"recompute={recompute}", ranks=8,
    ).layout  # fmt: skip


def _actions(forward, inputs, weights, merged):
    """Return the seconds of a chunk, of whose split backward pass the whole one takes a share."""
    return ActionSeconds(forward, merged * (inputs + weights), inputs, weights)


DURATIONS = st.builds(
    _actions, *[st.floats(0.1, 3.0)] * 3, st.sampled_from([1.0, 0.96, 0.5])
)  # fmt: skip


@given(st.data())
def test_no_simulation_is_faster_than_the_bound(data):
    name = data.draw(st.sampled_from(list(SPLIT)))
    chunks = data.draw(st.sampled_from(SPLIT[name]))
    least = 1 if name in ("1f1b", "interleaved") else 0
    waiting = data.draw(st.integers(least, 6))
    recompute = data.draw(st.sampled_from(["none", "full"]))
    layout = _layout(name, chunks, waiting, data.draw(st.integers(STAGES, 30)), recompute)
    seconds = [[data.draw(DURATIONS) for _ in range(chunks)] for _ in range(STAGES)]
    send = Send(*data.draw(st.tuples(st.floats(0, 0.5), st.floats(0, 0.5))))
    simulated = pass_seconds(layout, seconds, send)
    assert least_pass_seconds(layout, seconds) <= simulated
