"""The whole configuration of a run, and the rules that span its sections."""

from typing import Literal

from frontier_llm.config.cluster import ClusterConfig
from frontier_llm.config.collectives import CollectivesConfig
from frontier_llm.config.data import DataConfig
from frontier_llm.config.launch import LaunchConfig
from frontier_llm.config.model import ModelConfig
from frontier_llm.config.optimizer import OptimizerConfig
from frontier_llm.config.parallel import ParallelConfig
from frontier_llm.config.precision import PrecisionConfig
from frontier_llm.config.section import Section
from frontier_llm.config.sharding import ShardingConfig
from frontier_llm.config.telemetry import TelemetryConfig
from frontier_llm.config.trainer import TrainerConfig


class RunSection(Section):
    """The run directory."""

    dir: str
    """Everything a run writes lies here: one directory a run."""
    resume: Literal["never"]
    """What to do with what the directory already holds; `never` refuses a used one."""


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
    cluster: ClusterConfig
    """The hardware."""
    telemetry: TelemetryConfig
    """What is written about the run."""
    run: RunSection
    """Where it is written."""

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate reaches its minimum."""
        return self.optimizer.decay_steps or self.trainer.steps
