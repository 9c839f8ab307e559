"""Measure the memory that a step of training allocates on a CPU."""

from itertools import accumulate

from torch.profiler import ProfilerActivity, profile

from tests.trainer.rig import make_rig


def measure_peak(world, values):
    """Return the most bytes that a step allocates besides the states, as the allocator counts."""
    rig = make_rig(world, values)
    rig.train(1)  # creates buffers that stay
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        rig.train(1, first=1)
    events = profiled.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(size for _, size in changes))
