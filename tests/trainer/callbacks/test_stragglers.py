"""Which ranks are slow."""

import time
from types import SimpleNamespace

from frontier_llm.config import decode
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.trainer.callbacks.run_checks import Stragglers, slower_than
from tests.ranks import run_ranks
from tests.values import tiny_values

CONFIG = decode(tiny_values("watchdog.stragglers_every_steps=5", "watchdog.straggler_ratio=2"))


def stragglers_of(world):
    hardware = SimpleNamespace(accelerator=Accelerator.of_rank(0))
    control = SimpleNamespace(watchdog=SimpleNamespace(report_late=None))
    context = SimpleNamespace(config=CONFIG, world=world, hardware=hardware, control=control)
    return Stragglers(context)


def test_slow_is_more_than_so_many_times_the_median():
    assert slower_than([1.0, 1.1, 0.9, 2.5], 2) == [3]
    assert slower_than([1.0, 1.1, 0.9, 1.9], 2) == []


def test_a_rank_that_is_slow_twice_is_named_on_every_rank():
    def work(world):
        stragglers = stragglers_of(world)
        slow_from = 10

        def probe():
            return 5.0 if world.rank == 2 and step >= slow_from else 1.0

        stragglers._probe = probe
        found = {}
        for step in range(1, 21):
            found[step] = stragglers.compare(step)
        return {step: slow for step, slow in found.items() if slow}

    # compared after steps 5, 10, 15, 20; slow since 10, so known since 15
    assert run_ranks(work, 3) == [{15: [2], 20: [2]}] * 3


def test_the_probe_measures_this_ranks_device():
    def work(world):
        stragglers = stragglers_of(world)
        start = time.perf_counter()
        seconds = stragglers._probe()
        return 0 < seconds < time.perf_counter() - start

    assert run_ranks(work, 1) == [True]
