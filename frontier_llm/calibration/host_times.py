"""Measure steps of tiny models, and compute from them the times of the CPU of a rank.

The kernels of a tiny model do almost no work. Its steps take as long as the program needs to start
them: in Python, in torch and in autograd.
"""

import statistics
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from frontier_llm.calibration.timing import device
from frontier_llm.config.engine import HostTimes
from frontier_llm.config.run import RunConfig
from frontier_llm.data.batch import AnyBatch, Batch
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.parallel import megatron_cpu
from frontier_llm.parallel.groups import make_groups
from frontier_llm.trainer.bare_step import bare_step

WARM_UP, STEPS = 5, 25
"""Steps before the measured ones, and measured steps."""


class TinyCase(NamedTuple):
    """Size of a tiny model and of its step."""

    layers: int
    micro_batches: int


CASES = (TinyCase(2, 1), TinyCase(2, 4), TinyCase(6, 4))
"""The measured cases: a base, one with more micro-batches, and one with more layers too."""


def measure_steps(configs: Mapping[TinyCase, RunConfig]) -> dict[TinyCase, float]:
    """Return the median seconds of a step of each case. Collective over all ranks."""
    if device().type == "cpu":
        megatron_cpu.install()
    ranks = dist.get_world_size()
    config = next(iter(configs.values()))
    groups = make_groups(config.parallel, ranks, head_stage=0)
    seconds = {}
    for case, config in configs.items():
        layout = ResolvedLayout.resolve(config, ranks, ranks)
        _, step = bare_step(config, layout, groups, device())
        batches = _batches(layout)
        times = []
        for number in range(1, WARM_UP + STEPS + 1):
            dist.barrier()
            start = time.perf_counter()
            step.run(number, batches, learning_rate=1e-4)
            times.append(time.perf_counter() - start)
        seconds[case] = statistics.median(times[WARM_UP:])
    return seconds


def host_times(
    measured: Mapping[TinyCase, float], planned: Mapping[TinyCase, float], defaults: HostTimes
) -> HostTimes:
    """Return the seconds that the planned times of kernels and messages do not contain.

    Args:
        measured: measured seconds of a step.
        planned: seconds of a step that the planner predicts without times of the CPU; 0 on a GPU,
            where the CPU does not wait for the kernels.
        defaults: its `backward_share` divides the time of a layer.
    """
    base, repeated, deeper = (measured[case] - planned[case] for case in CASES)
    few, many = CASES[0], CASES[2]
    layer = max(0.0, deeper - repeated) / (many.layers - few.layers) / many.micro_batches
    micro_batch = (repeated - base) / (many.micro_batches - few.micro_batches)
    micro_batch = max(0.0, micro_batch - few.layers * layer)
    step = max(0.0, base - micro_batch - few.layers * layer)
    return HostTimes(
        layer_us=1e6 * layer / (1 + defaults.backward_share),
        backward_share=defaults.backward_share,
        tensor_us=0.0,
        tensor_rank_us=0.0,
        micro_batch_us=1e6 * micro_batch,
        step_us=1e6 * step,
    )


def _batches(layout: ResolvedLayout) -> list[AnyBatch]:
    """Return the micro-batches of a step, all of the first token."""
    tokens = torch.zeros(layout.micro_batch, layout.sequence_length, dtype=torch.int64)
    positions = torch.arange(layout.sequence_length).expand_as(tokens)
    batch = Batch(tokens, tokens, positions).to(device())
    return [batch] * layout.micro_batches
