"""The configuration of a run: all sections together."""

from typing import Any, Literal

from pydantic import Field

from frontier_llm.config.checkpoint import CheckpointConfig
from frontier_llm.config.cluster import ClusterConfig
from frontier_llm.config.collectives import CollectivesConfig
from frontier_llm.config.data import DataConfig
from frontier_llm.config.launch import LaunchConfig
from frontier_llm.config.model import ModelConfig
from frontier_llm.config.optimizer import OptimizerConfig
from frontier_llm.config.parallel import ParallelConfig
from frontier_llm.config.paths import PathName
from frontier_llm.config.planner import PlannerConfig
from frontier_llm.config.precision import PrecisionConfig
from frontier_llm.config.recovery import RecoveryConfig
from frontier_llm.config.section import Section
from frontier_llm.config.sharding import ShardingConfig
from frontier_llm.config.telemetry import TelemetryConfig
from frontier_llm.config.trainer import TrainerConfig
from frontier_llm.config.watchdog import WatchdogConfig

DEFAULT_COOLDOWN_SHARE = 0.2
"""Share of a run for which a `wsd` schedule decays. Hägele et al. (arXiv:2405.18392)
find that 10% to 20% suffice."""


class RunSection(Section):
    """The run directory."""

    dir: PathName
    """Directory for all files that the run writes. Every run needs its own directory."""
    resume: Literal["auto", "required", "never"]
    """Whether the run resumes from the newest checkpoint in `run.dir`. `auto`: it resumes if there
    is a checkpoint; `required`: it is an error if there is no checkpoint; `never`: a directory that
    a run has used is refused."""
    init_from: PathName | None
    """Initial weights of a new run: a checkpoint, or a directory with checkpoints (a run.dir, or
    the output of frontier-llm convert); null = random weights. Keys of the model must have the
    values of that run, unless `run.allow_changes` names them. The weights belong to a tokenizer,
    which `data.tokenizer` sets; `run.allow_changes=[data.tokenizer]` allows a new one, for which
    the run has to learn new embeddings."""
    init_encoder_from: PathName | None = None
    """Initial weights of the encoder, from a decoder of its dimensions; null = those of
    `run.init_from`."""
    allow_changes: tuple[str, ...] = Field(strict=False)
    """Keys or sections whose values may differ from the values of the checkpoint from which the run
    resumes, such as `[optimizer.learning_rate]`. Only keys of the model, the data, the optimizer
    and the schedule have to be listed; other keys may always differ."""


class RunConfig(Section):
    """All settings of a run."""

    model: ModelConfig
    """The model."""
    parallel: ParallelConfig
    """Tensor and pipeline parallelism."""
    sharding: ShardingConfig
    """How model states are sharded over data-parallel ranks."""
    collectives: CollectivesConfig
    """Number formats of the messages between data-parallel ranks."""
    precision: PrecisionConfig
    """Number format of the computation."""
    recompute: Literal["none", "selective", "full"]
    """Activations that are recomputed in the backward pass instead of being kept. `selective`:
    those of attention without its projections; `full`: all activations inside each layer."""
    kernels: Literal["auto", "torch", "fused", "elementwise", "compiled", "fastest"]
    """Implementation of the layers. `torch`: PyTorch; `elementwise`: PyTorch, with torch.compile of
    rotary positions and gated activations; `compiled`: torch.compile of each layer; `fused`: norms
    of apex or TransformerEngine, with an error if they do not work; `auto`: fused norms if a test
    call on a tiny tensor works, otherwise PyTorch; on a GPU as `fastest`, unless
    `trainer.deterministic` is set; `fastest`: the same norms, and the first six steps decide
    whether functions are compiled as by `elementwise`."""
    attention: Literal["sdpa", "flex"] = "sdpa"
    """Implementation of self attention with relative positions, windows, capped scores or separate
    documents. `sdpa`: torch's scaled_dot_product_attention, one document or block of queries at a
    time; `flex`: torch's FlexAttention on a GPU, which stores no biases."""
    optimizer: OptimizerConfig
    """The optimizer and its schedule."""
    data: DataConfig
    """The training data and the size of a batch."""
    trainer: TrainerConfig
    """The training loop."""
    launch: LaunchConfig
    """The processes and how they are started."""
    recovery: RecoveryConfig = RecoveryConfig()
    """How the run continues when a process dies."""
    watchdog: WatchdogConfig
    """Time limits of the phases of a run."""
    checkpoint: CheckpointConfig
    """When and where checkpoints are saved."""
    cluster: ClusterConfig
    """The hardware."""
    plan: Literal["off", "check", "dry_run"]
    """What happens before memory is allocated. `check`: a configuration that does not fit in device
    memory is refused; `dry_run`: every stage is built without memory and compared with the plan,
    and nothing is trained; `off`: nothing."""
    planner: PlannerConfig
    """The search of frontier-llm plan."""
    telemetry: TelemetryConfig
    """Console lines, metrics and traces."""
    callbacks: tuple[str, ...] = Field((), strict=False)
    """Your own callbacks, `[my_module:MyCallback, ...]`: subclasses of Callback in
    frontier_llm/trainer/callbacks/callback.py, which run after the built-in callbacks."""
    run: RunSection
    """The run directory, and how a run starts."""

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate reaches its minimum."""
        return self.optimizer.decay_steps or self.trainer.steps

    @property
    def cooldown_steps(self) -> int:
        """Length of the cooldown of the schedule `wsd`, in steps."""
        optimizer = self.optimizer
        share = optimizer.cooldown_share or DEFAULT_COOLDOWN_SHARE
        return optimizer.cooldown_steps or max(1, round(share * self.decay_steps))

    def changed(self, section: str, **values: Any) -> "RunConfig":
        """Return a copy in which keys of a section have other values, which are not checked."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})
