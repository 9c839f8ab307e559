"""The objects of one rank: trainer/assemble.py makes them, the loop and the callbacks use them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from frontier_llm.config.run import RunConfig
from frontier_llm.data.corpora import BlendedSamples, Corpora, CorpusSamples, ValidationWindows
from frontier_llm.data.loader import BatchLoader
from frontier_llm.data.sample_counts import window_tokens
from frontier_llm.data.sample_order import LengthSegment, resumed_lengths
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.device.kernels import Kernels
from frontier_llm.health.watchdog import Watchdog
from frontier_llm.launch.stop import StopRequest
from frontier_llm.launch.world import World
from frontier_llm.model.build import Model
from frontier_llm.parallel.groups import Groups
from frontier_llm.saving.checkpoints import Checkpoints
from frontier_llm.saving.restorer import Restorer
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.trainer.evaluate import Evaluation
from frontier_llm.trainer.progress import Progress
from frontier_llm.trainer.sample import Sampler
from frontier_llm.trainer.step import TrainStep
from frontier_llm.trainer.step_meter import StepMeter


@dataclass(frozen=True)
class ResolvedPrecision:
    """The compute precision after `auto` is resolved; the same on all ranks."""

    name: str
    """`fp32`, `bf16` or `fp16`."""
    reason: str
    """Why this precision was chosen: the measured speeds, or the key that sets it."""


@dataclass(frozen=True)
class Hardware:
    """The device of a rank, its compute precision and its kernels."""

    accelerator: Accelerator
    precision: ResolvedPrecision
    kernels: Kernels
    attention: Mapping[str, str]
    """The kernel of each kind of attention."""


@dataclass(frozen=True)
class TrainingData:
    """The corpora of a run and the loaders that read them."""

    corpus: Corpora
    windows: CorpusSamples | BlendedSamples
    """The training samples."""
    lengths: list[LengthSegment]
    """The lengths of samples over the run."""
    train: BatchLoader
    """Reads the training samples of this rank."""
    validation: BatchLoader
    """Reads the validation samples of this rank."""
    validation_windows: ValidationWindows
    """The validation samples of all ranks."""

    @property
    def blend(self) -> BlendedSamples | None:
        """The training samples, if they come from several corpora; else None."""
        return self.windows if isinstance(self.windows, BlendedSamples) else None

    def to_meta(self) -> dict[str, Any]:
        """Return what decides which samples a run reads, as plain JSON for a checkpoint."""
        blend = self.blend.schedule.to_meta() if self.blend else None
        return {"blend": blend, "lengths": [asdict(segment) for segment in self.lengths]}

    def resume(self, meta: Mapping[str, Any], next_sample: int) -> None:
        """Restore what earlier starts of the run have read, from `to_meta` in a checkpoint.

        Checkpoints of older versions lack the lengths; such a run has had the length of the
        checkpoint's configuration. A single corpus goes on as the one of a blend with its content,
        or its name. `next_sample` is the first one that is read with the configuration of this
        start. Raises a ConfigError if a corpus of the earlier starts is missing.
        """
        data = self.corpus.config
        if self.blend is not None:
            self.blend.resume(meta.get("blend") or self._only_corpus(meta), next_sample)
        lengths = meta.get("lengths")
        if lengths is None:
            tokens = window_tokens(data, meta["config"]["data"]["sequence_length"])
            lengths = [asdict(LengthSegment(0, tokens, keeps_all=True))]
        self.lengths[:] = resumed_lengths(lengths, next_sample, window_tokens(data))
        self.windows.set_lengths(self.lengths)

    def _only_corpus(self, meta: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the history of a blend of the one corpus that the run has read so far."""
        digests = (corpus.manifest.digest for corpus in self.corpus.corpora)
        own = dict(zip(digests, self.corpus.names, strict=True))
        only = own.get(meta["corpus"], meta["config"]["data"]["name"])
        return [{"first_sample": 0, "weights": {only: 1.0}}]

    def supplied(self, next_sample: int) -> dict[str, int]:
        """Return how many samples of each corpus come before a sample of the run, by name."""
        counts = self.blend.schedule.supplied(next_sample) if self.blend else {}
        return {name: counts.get(name, next_sample) for name in self.corpus.names}


@dataclass(frozen=True)
class RunControl:
    """The objects that may end a run before its last step."""

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
    """The model chunks of this rank."""
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


@dataclass(frozen=True)
class Continuation:
    """Where training continues with states in memory, after ranks were replaced."""

    step: int
    """The last step whose update is in the states."""
    ended: int
    """The last step that was ended on all ranks: `step`, or the one before."""
    saves: bool
    """Whether to save the states now, because a checkpoint was lost."""
