"""What one rank is made of."""

from dataclasses import dataclass

from frontier_llm.config.run import RunConfig
from frontier_llm.data.corpora import BlendedSamples, Corpora
from frontier_llm.data.loader import BatchLoader
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.device.kernels import Kernels
from frontier_llm.model.build import Model
from frontier_llm.parallel.groups import Groups
from frontier_llm.parallel.stop import StopRequest
from frontier_llm.parallel.stragglers import Stragglers
from frontier_llm.parallel.watchdog import Watchdog
from frontier_llm.parallel.world import World
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.trainer.checkpoints import Checkpoints
from frontier_llm.trainer.evaluate import Evaluation
from frontier_llm.trainer.progress import Progress
from frontier_llm.trainer.resume import Restorer
from frontier_llm.trainer.sample import Sampler
from frontier_llm.trainer.step import TrainStep


@dataclass(frozen=True)
class Choices:
    """What was left to the machine to decide, the same on all ranks."""

    precision: str
    """`fp32`, `bf16` or `fp16`."""
    reason: str
    """Measured speeds, or that the configuration said so."""


@dataclass(frozen=True)
class Parts:
    """Everything of a rank, put together by trainer/assemble.py."""

    config: RunConfig
    world: World
    accelerator: Accelerator
    choices: Choices
    stop: StopRequest
    watchdog: Watchdog
    stragglers: Stragglers
    groups: Groups
    kernels: Kernels
    corpus: Corpora
    blend: BlendedSamples | None
    """What is trained on, if it is of several corpora."""
    model: Model
    states: ShardedStates
    step: TrainStep
    evaluation: Evaluation
    loader: BatchLoader
    validation_loader: BatchLoader
    sampler: Sampler
    progress: Progress
    checkpoints: Checkpoints
    restorer: Restorer
