"""The whole configuration of a run, and the rules that span its sections."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.checkpoint import CheckpointConfig
from frontier_llm.config.cluster import ClusterConfig
from frontier_llm.config.collectives import CollectivesConfig
from frontier_llm.config.data import DataConfig
from frontier_llm.config.launch import LaunchConfig
from frontier_llm.config.model import ModelConfig
from frontier_llm.config.optimizer import OptimizerConfig
from frontier_llm.config.parallel import ParallelConfig
from frontier_llm.config.planner import PlannerConfig
from frontier_llm.config.precision import PrecisionConfig
from frontier_llm.config.section import Section
from frontier_llm.config.sharding import ShardingConfig
from frontier_llm.config.telemetry import TelemetryConfig
from frontier_llm.config.trainer import TrainerConfig
from frontier_llm.config.watchdog import WatchdogConfig


class RunSection(Section):
    """The run directory."""

    dir: str
    """Everything a run writes lies here: one directory a run."""
    resume: Literal["auto", "required", "never"]
    """Whether a run that the directory holds goes on from its newest checkpoint. `auto`: if there
    is one; `required`: it is an error if there is none; `never`: a used directory is refused."""
    init_from: str | None
    """A checkpoint, or a folder that holds some (a run.dir, or what tools/convert_checkpoint.py
    wrote), with whose weights a new run begins; null = with random ones."""
    allow_changes: tuple[str, ...] = Field(strict=False)
    """Keys, or groups of keys, of model, data, optimizer and schedule that may differ from the
    run that goes on: `[optimizer.learning_rate]`. Everything else may differ anyway."""


class RunConfig(Section):
    """Everything that decides a run."""

    model: ModelConfig
    """The model."""
    parallel: ParallelConfig
    """How the model is cut."""
    sharding: ShardingConfig
    """How its states are cut over data-parallel ranks."""
    collectives: CollectivesConfig
    """What travels between the replicas."""
    precision: PrecisionConfig
    """Number format of the computation."""
    recompute: Literal["none", "selective", "full"]
    """What the backward pass computes again instead of keeping: nothing, the attention core, or
    each whole layer."""
    kernels: Literal["auto", "torch", "fused"]
    """Norms and update: `torch` alone, `fused` from apex or TransformerEngine (an error if they
    do not work), or `auto`: fused where a call on a tiny tensor proves that they work."""
    optimizer: OptimizerConfig
    """The update rule."""
    data: DataConfig
    """What is read."""
    trainer: TrainerConfig
    """The loop."""
    launch: LaunchConfig
    """The processes."""
    watchdog: WatchdogConfig
    """How long its phases may take."""
    checkpoint: CheckpointConfig
    """What is saved on the way."""
    cluster: ClusterConfig
    """The hardware."""
    plan: Literal["off", "check", "dry_run"]
    """Before anything is allocated: `check` refuses what cannot fit the devices, `dry_run` builds
    every stage without memory, compares it with what was planned, and trains nothing."""
    planner: PlannerConfig
    """What tools/plan.py searches."""
    telemetry: TelemetryConfig
    """What is written about the run."""
    run: RunSection
    """Where it is written."""

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate reaches its minimum."""
        return self.optimizer.decay_steps or self.trainer.steps
