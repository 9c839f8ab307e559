"""The objects of one rank, as trainer/assemble.py puts them together."""

from dataclasses import dataclass

from frontier_llm.config.run import RunConfig
from frontier_llm.data.corpora import BlendedSamples, Corpora
from frontier_llm.data.loader import BatchLoader
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.device.kernels import Kernels
from frontier_llm.health.watchdog import Watchdog
from frontier_llm.launch.stop import StopRequest
from frontier_llm.launch.world import World
from frontier_llm.model.build import Model
from frontier_llm.parallel.groups import Groups
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.trainer.checkpoints import Checkpoints
from frontier_llm.trainer.evaluate import Evaluation
from frontier_llm.trainer.progress import Progress
from frontier_llm.trainer.resume import Restorer
from frontier_llm.trainer.sample import Sampler
from frontier_llm.trainer.step import TrainStep
from frontier_llm.trainer.step_meter import StepMeter


@dataclass(frozen=True)
class ResolvedPrecision:
    """The compute precision after `auto` is resolved; the same on all ranks."""

    name: str
    """`fp32`, `bf16` or `fp16`."""
    reason: str
    """The measured speeds, or the key of the configuration that sets it."""


@dataclass(frozen=True)
class Hardware:
    """The device of a rank, and what the rank computes with."""

    accelerator: Accelerator
    precision: ResolvedPrecision
    kernels: Kernels


@dataclass(frozen=True)
class TrainingData:
    """The corpora of a run and the loaders that read them."""

    corpus: Corpora
    blend: BlendedSamples | None
    """The training samples, if they come from several corpora."""
    train: BatchLoader
    validation: BatchLoader


@dataclass(frozen=True)
class RunControl:
    """What may end a run before its last step."""

    watchdog: Watchdog
    stop: StopRequest


@dataclass(frozen=True)
class TrainerContext:
    """Everything that the training loop and the callbacks of one rank need."""

    config: RunConfig
    world: World
    groups: Groups
    hardware: Hardware
    data: TrainingData
    model: Model
    states: ShardedStates
    """Parameters, gradients and optimizer states."""
    train_step: TrainStep
    evaluation: Evaluation
    sampler: Sampler
    meter: StepMeter
    progress: Progress
    checkpoints: Checkpoints
    restorer: Restorer
    control: RunControl
