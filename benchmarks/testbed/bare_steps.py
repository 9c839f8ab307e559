"""What a rank needs to time training steps of frontier_llm without data files."""

import gc

import torch

from frontier_llm.data.batch import Batch
from frontier_llm.device.accelerator import keep_freed_memory
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.parallel import megatron_cpu

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


def random_batches(layout: ResolvedLayout, replica: int = 0) -> list[Batch]:
    """Return the micro-batches of a replica's step, with random tokens."""
    generator = torch.Generator().manual_seed(replica)
    length, samples = layout.sequence_length, layout.micro_batch
    positions = torch.arange(length).expand(samples, -1)
    batches: list[Batch] = []
    for _ in range(layout.micro_batches):
        shape = (samples, length + 1)
        rows = torch.randint(layout.model.vocabulary, shape, generator=generator)
        batches.append(Batch(rows[:, :-1], rows[:, 1:], positions))
    return batches
