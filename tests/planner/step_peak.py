"""Measure the memory that a step of training allocates on a CPU."""

from itertools import accumulate

from torch.profiler import ProfilerActivity, profile

from tests.trainer.rig import make_rig


def measure_peak(world, values, steps=1):
    """Return the most bytes that a step allocates besides the states, as the allocator counts.

    A message that arrives late keeps its buffer longer, so the step with the least is the one
    without such messages.
    """
    rig = make_rig(world, values)
    rig.train(1)  # creates buffers that stay
    return min(_peak_of_step(rig, step) for step in range(1, 1 + steps))


def _peak_of_step(rig, step):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        rig.train(1, first=step)
    events = profiled.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(size for _, size in changes))
