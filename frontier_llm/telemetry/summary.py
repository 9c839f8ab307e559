"""summary.json: what a run was and how it ended, beside its per-step metrics."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from frontier_llm.errors import TrainingError

SUMMARY_FILE = "summary.json"


class _Part(BaseModel):
    """Tolerant on purpose: a report must also be made of an older or a broken-off run."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", use_attribute_docstrings=True, ser_json_inf_nan="null"
    )


class Layout(_Part):
    """How the model is cut over ranks."""

    tensor: int = 1
    """Ranks that cut each matrix."""
    pipeline: int = 1
    """Stages."""
    chunks: int = 1
    """Pieces a stage."""
    data: int = 1
    """Replicas."""
    sequence: bool = False
    """Whether sequence parallelism is on."""
    ranks_per_node: int = 1
    """Where a node ends."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data


class RankSummary(_Part):
    """One rank: where it stands, what it holds."""

    rank: int
    """Its number."""
    host: str = ""
    """Machine it ran on."""
    tensor: int = 0
    """Coordinate on the tensor axis."""
    data: int = 0
    """Coordinate on the data axis: its replica."""
    pipeline: int = 0
    """Coordinate on the pipeline axis: its stage."""
    layers: list[tuple[int, int]] = Field(default_factory=list)
    """First and last layer of each chunk, both included."""
    memory_bytes: dict[str, int] = Field(default_factory=dict)
    """Allocated bytes by category: parameters, gradients, master, moments, ..."""
    predicted_bytes: dict[str, int] = Field(default_factory=dict)
    """What geometry says these must be (`gathered`: may be at most)."""
    peak_bytes: int | None = None
    """Most that was held: allocations of the device, or the resident set on CPU."""


class PlanRow(_Part):
    """A figure of the planner beside what the run measured."""

    name: str
    """What it is of."""
    unit: Literal["bytes", "seconds"]
    """Of both numbers."""
    predicted: float | None
    """None = the planner says nothing about this device."""
    measured: float
    """By rank 0, in the first steps."""


class TextSample(_Part):
    """Text that the trained model wrote."""

    prompt: str
    """What it was given."""
    text: str
    """What it added."""


class RunSummary(_Part):
    """All that is known of a run besides its steps; what is not known yet is None."""

    model: str = ""
    """Name of the model."""
    parameters: int | None = None
    """Of the whole model, each counted once."""
    layout: Layout | None = None
    """How it is cut."""
    ranks: list[RankSummary] = Field(default_factory=list)
    """One entry a rank."""
    precision: str | None = None
    """Compute format, resolved."""
    device: str | None = None
    """As the driver names it."""
    kernels: str | None = None
    """Which fused kernels are used, and why."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Of python, torch, megatron-core, ..."""
    total_steps: int | None = None
    """Steps that were asked for."""
    tokens: int | None = None
    """Consumed."""
    seconds: float | None = None
    """Wall time of the whole run."""
    final_loss: float | None = None
    """Training loss of the last step, in nats a token."""
    initial_validation_loss: float | None = None
    """Before the first step, in nats a token."""
    validation_loss: float | None = None
    """The last one, in nats a token."""
    validation_bits_per_byte: float | None = None
    """The last one, per byte of text."""
    plan: list[PlanRow] = Field(default_factory=list)
    """What was planned and what was measured."""
    samples: list[TextSample] = Field(default_factory=list)
    """Written at the end."""
    exit_code: int | None = None
    """Of the process; None = it has not ended, or was killed."""
    exit_reason: str | None = None
    """Why it ended, in words."""

    def write(self, run_dir: Path) -> Path:
        """Write summary.json, replacing an earlier one whole.

        Raises:
            TrainingError: it cannot be written; names the file.
        """
        path = run_dir / SUMMARY_FILE
        partial = path.with_suffix(".json.partial")
        try:
            partial.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
            partial.replace(path)  # atomic: a reader sees the old one or the new one
        except OSError as error:
            raise TrainingError(f"{path} cannot be written: {error.strerror}") from error
        return path

    @classmethod
    def read(cls, run_dir: Path) -> "RunSummary | None":
        """Read a run's summary; None where it has none that can be read."""
        try:
            return cls.model_validate_json((run_dir / SUMMARY_FILE).read_bytes())
        except (OSError, ValidationError):
            return None
