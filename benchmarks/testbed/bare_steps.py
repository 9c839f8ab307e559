"""What a rank needs to time training steps of frontier_llm without data files."""

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from frontier_llm.data.batch import AnyBatch, Batch
from frontier_llm.device.accelerator import Accelerator, keep_freed_memory
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.parallel import megatron_cpu
from frontier_llm.parallel.groups import Groups, destroy_groups, make_groups

LEARNING_RATE = 1e-4
"""Learning rate of all contenders; the speed does not depend on it."""
CPU = torch.device("cpu")


def prepare_cpu() -> None:
    """Set up a rank on a CPU as a training run does; freed memory is kept."""
    megatron_cpu.install()
    keep_freed_memory()


def freeze_objects() -> None:
    """Take all present objects out of the garbage collection, as trainer/assemble.py does."""
    gc.collect()
    gc.freeze()


@contextmanager
def alone(accelerator: Accelerator) -> Iterator[Groups]:
    """Make the process groups of a single rank."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "gloo" if accelerator.is_cpu else "nccl"
        dist.init_process_group(backend, f"file://{folder}/store", rank=0, world_size=1)
        yield make_groups(Grid(1, 1, 1, 1), head_stage=0)
        destroy_groups()


def random_batches(layout: ResolvedLayout, replica: int = 0) -> list[AnyBatch]:
    """Return the micro-batches of a replica's step, with random tokens."""
    generator = torch.Generator().manual_seed(replica)
    length, samples = layout.sequence_length, layout.micro_batch
    positions = torch.arange(length).expand(samples, -1)
    batches: list[AnyBatch] = []
    for _ in range(layout.micro_batches):
        shape = (samples, length + 1)
        rows = torch.randint(layout.model.vocabulary, shape, generator=generator)
        batches.append(Batch(rows[:, :-1], rows[:, 1:], positions))
    return batches
