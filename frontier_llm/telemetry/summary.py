"""summary.json: what a run was and how it ended. The metrics of its steps are in metrics.jsonl."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from frontier_llm.errors import TrainingError

SUMMARY_FILE = "summary.json"


class _Part(BaseModel):
    """Base of the classes below. Unknown keys are ignored, so that older files can be read."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", use_attribute_docstrings=True, ser_json_inf_nan="null"
    )


class Layout(_Part):
    """How the model is divided over ranks."""

    tensor: int = 1
    """Tensor-parallel ranks, among which each matrix is divided."""
    pipeline: int = 1
    """Pipeline stages."""
    chunks: int = 1
    """Model chunks per stage."""
    data: int = 1
    """Data-parallel replicas."""
    sequence: bool = False
    """Whether sequence parallelism is used."""
    ranks_per_node: int = 1
    """Ranks per node."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data


class RankSummary(_Part):
    """One rank: its place in the layout, and its memory."""

    rank: int
    """Number of the rank."""
    host: str = ""
    """Name of the host."""
    tensor: int = 0
    """Coordinate on the tensor axis."""
    data: int = 0
    """Coordinate on the data axis, which is the replica."""
    pipeline: int = 0
    """Coordinate on the pipeline axis, which is the stage."""
    layers: list[tuple[int, int]] = Field(default_factory=list)
    """First and last layer of each chunk, both included."""
    memory_bytes: dict[str, int] = Field(default_factory=dict)
    """Allocated bytes by category: parameters, gradients, master, moments, ..."""
    predicted_bytes: dict[str, int] = Field(default_factory=dict)
    """Predicted bytes of the same categories (upper bounds for `gathered` and `messages`)."""
    peak_bytes: int | None = None
    """Peak of the device's allocator, or of the resident set on a CPU."""


class PlanRow(_Part):
    """A figure that the planner predicted and the run measured."""

    name: str
    """Name of the figure."""
    unit: Literal["bytes", "seconds"]
    """Unit of both numbers."""
    predicted: float | None
    """Prediction; None = the planner has no constants for this device."""
    measured: float
    """Measurement of rank 0 in the first steps."""


class TextSample(_Part):
    """Text that the trained model wrote."""

    prompt: str
    """The beginning that the model was given."""
    text: str
    """The continuation that the model wrote."""


class RunSummary(_Part):
    """Facts of a run other than its steps; a fact that is not known yet is None."""

    model: str = ""
    """Name of the model."""
    parameters: int | None = None
    """Parameters of the whole model, each counted once."""
    layout: Layout | None = None
    """How the model is divided over ranks."""
    ranks: list[RankSummary] = Field(default_factory=list)
    """One entry per rank."""
    precision: str | None = None
    """Compute precision; `auto` is resolved."""
    device: str | None = None
    """Name of the device, from its driver."""
    kernels: str | None = None
    """Kernels in use, and the reason."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of python, torch and megatron-core."""
    total_steps: int | None = None
    """Value of trainer.steps."""
    tokens: int | None = None
    """Tokens trained on."""
    seconds: float | None = None
    """Wall time of the whole run."""
    final_loss: float | None = None
    """Training loss of the last step, in nats per token."""
    initial_validation_loss: float | None = None
    """Validation loss before the first step, in nats per token."""
    validation_loss: float | None = None
    """Last validation loss, in nats per token."""
    validation_bits_per_byte: float | None = None
    """Last validation loss, in bits per byte of text."""
    plan: list[PlanRow] = Field(default_factory=list)
    """Predictions of the planner and measurements of the run."""
    samples: list[TextSample] = Field(default_factory=list)
    """Text that the model wrote at the end of the run."""
    exit_code: int | None = None
    """Exit code of the run; None = it has not ended, or was killed."""
    exit_reason: str | None = None
    """Why the run ended."""

    def write(self, run_dir: Path) -> Path:
        """Write summary.json; an earlier one is replaced atomically.

        Raises:
            TrainingError: the file cannot be written; the message names it.
        """
        path = run_dir / SUMMARY_FILE
        partial = path.with_suffix(".json.partial")
        try:
            partial.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
            partial.replace(path)  # atomic: a reader sees the old file or the new one
        except OSError as error:
            raise TrainingError(f"{path} cannot be written: {error.strerror}") from error
        return path

    @classmethod
    def read(cls, run_dir: Path) -> "RunSummary | None":
        """Read the summary of a run; return None if it has none or it is damaged."""
        try:
            return cls.model_validate_json((run_dir / SUMMARY_FILE).read_bytes())
        except (OSError, ValidationError):
            return None
