"""Measure steps of small models, and compute from them the times of the CPU of a rank.

On a GPU the models are so small that their kernels do almost no work: their steps take as long as
the program needs to start them, in Python, in torch and in autograd. On a CPU the same core starts
the kernels and computes, and its caches are full of operands when the program goes on. So the
models have layers of a usual size, and the planned times of their kernels are subtracted. The rest
also contains small kernels that the planner does not count, such as copies.

The memory in use after the steps of the smallest and of the largest model shows what a rank needs
beside its tensors, and what its allocator holds unused.
"""

import gc
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from frontier_lab.calibration.device import device, used_bytes
from frontier_llm.config.engine import HostTimes
from frontier_llm.config.run import RunConfig
from frontier_llm.data.batch import Batch
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.parallel import megatron_cpu
from frontier_llm.parallel.groups import Groups, make_groups
from frontier_llm.trainer.states import bare_step

WARM_UP, STEPS = 3, 9
"""Steps before the measured ones, and measured steps."""
SIZES = {
    "cpu": {"hidden": 256, "heads": 4, "tokens": 256, "vocabulary": 1024},
    "cuda": {"hidden": 32, "heads": 2, "tokens": 8, "vocabulary": 64},
}
"""Sizes of the models, by type of device."""


class SmallCase(NamedTuple):
    """Number of layers of a small model, of micro-batches per step, and of tensor ranks."""

    layers: int
    micro_batches: int
    tensor: int = 1


CASES = (SmallCase(2, 1), SmallCase(2, 4), SmallCase(6, 4))
"""The measured cases: a base, one with more micro-batches, and one with more layers too."""
TENSOR_CASE = CASES[2]._replace(tensor=2)
"""The largest case on two tensor ranks, which is measured if the number of ranks is even."""


def cases_of(ranks: int) -> tuple[SmallCase, ...]:
    """Return the cases that so many ranks measure."""
    return CASES if ranks % TENSOR_CASE.tensor else (*CASES, TENSOR_CASE)


Configs = Mapping[str, Mapping[SmallCase, RunConfig]]
"""Configurations of the small models, by number format and case."""
Seconds = dict[str, dict[SmallCase, float]]
"""Seconds of a step, by number format and case."""


@dataclass(frozen=True)
class SmallSteps:
    """What was measured with the small models."""

    seconds: Seconds
    used_bytes: dict[SmallCase, float]
    """Memory in use after the steps of each case in the first format, on data ranks."""


def measure_steps(configs: Configs) -> SmallSteps:
    """Measure the median seconds of a step of each case. Collective over all ranks.

    Nothing else may have been measured before, because freed memory stays in use. So later cases
    need more memory than earlier ones.
    """
    if device().type == "cpu":
        megatron_cpu.install()
    ranks = dist.get_world_size()
    seconds: Seconds = {precision: {} for precision in configs}
    used: dict[SmallCase, float] = {}
    for tensor in (1, TENSOR_CASE.tensor):
        groups = None
        for precision, cases in configs.items():
            for case, config in cases.items():
                if case.tensor != tensor:
                    continue
                gc.collect()  # frees the model of the case before
                layout = ResolvedLayout.resolve(config, ranks, ranks)
                if groups is None:
                    parallel_state.destroy_model_parallel()  # those of other cases
                    groups = make_groups(layout.grid, head_stage=0)
                seconds[precision][case] = _step_seconds(config, layout, groups)
                if precision == next(iter(configs)) and tensor == 1:
                    used[case] = used_bytes()
    return SmallSteps(seconds, used)


def host_times(
    measured: Mapping[SmallCase, float], planned: Mapping[SmallCase, float], defaults: HostTimes
) -> HostTimes:
    """Return the seconds that the planned times of kernels and messages do not contain.

    `planned` are seconds of a step that the planner predicts without times of the CPU; 0 on a GPU,
    where the CPU does not wait for the kernels. `defaults.backward_share` divides the time of a
    layer. What the case with tensor ranks takes in addition is that of their collectives: the calls
    and the wait for the slower rank, which happens in every layer.
    """
    rests = {case: measured[case] - planned[case] for case in measured}
    base, repeated, deeper = map(rests.__getitem__, CASES)
    few, many = CASES[0], CASES[2]
    layer = max(0.0, deeper - repeated) / (many.layers - few.layers) / many.micro_batches
    micro_batch = (repeated - base) / (many.micro_batches - few.micro_batches)
    micro_batch = max(0.0, micro_batch - few.layers * layer)
    step = max(0.0, base - micro_batch - few.layers * layer)
    tensor = max(0.0, rests.get(TENSOR_CASE, deeper) - deeper) / many.layers / many.micro_batches
    return HostTimes(
        layer_us=1e6 * layer / (1 + defaults.backward_share),
        backward_share=defaults.backward_share,
        tensor_us=1e6 * tensor / (1 + defaults.backward_share),
        tensor_rank_us=0.0,
        micro_batch_us=1e6 * micro_batch,
        step_us=1e6 * step,
    )


def _step_seconds(config: RunConfig, layout: ResolvedLayout, groups: Groups) -> float:
    """Return the median seconds of a step whose samples are all of the first token."""
    _, step = bare_step(config, layout, groups, device())
    tokens = torch.zeros(layout.micro_batch, layout.sequence_length, dtype=torch.int64)
    positions = torch.arange(layout.sequence_length).expand_as(tokens)
    batches = [Batch(tokens, tokens, positions).to(device())] * layout.micro_batches
    times = []
    for number in range(1, WARM_UP + STEPS + 1):
        dist.barrier()
        start = time.perf_counter()
        step.run(number, batches, learning_rate=1e-4)
        times.append(time.perf_counter() - start)
    step.states.close()  # with its hooks the model would never be freed
    return statistics.median(times[WARM_UP:])
