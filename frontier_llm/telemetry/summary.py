"""Define summary.json: the facts of a run as a whole, and how the run ended.

trainer/callbacks/run_report.py writes the file, and the report reads it. The numbers of the steps
are in metrics.jsonl.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from frontier_llm.errors import TrainingError

SUMMARY_FILE = "summary.json"


class _Part(BaseModel):
    """Base of the classes below. Unknown keys are ignored: files of other versions can be read."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", use_attribute_docstrings=True, ser_json_inf_nan="null"
    )


class Layout(_Part):
    """How the model is divided over ranks."""

    tensor: int = 1
    """Number of tensor-parallel ranks, among which each matrix is divided."""
    pipeline: int = 1
    """Number of pipeline stages."""
    chunks: int = 1
    """Number of model chunks per stage; more than 1 if stages are interleaved."""
    head_stage: int | None = None
    """Stage with the output layer; None = the last one."""
    data: int = 1
    """Number of data-parallel replicas."""
    sequence: bool = False
    """Whether sequence parallelism is used."""
    ranks_per_node: int = 1
    """Number of ranks per node."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data


class RankSummary(_Part):
    """One rank: its coordinates in the layout, and its memory."""

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
    """First and last layer of each model chunk, both included."""
    memory_bytes: dict[str, int] = Field(default_factory=dict)
    """Allocated bytes by category, such as parameters, gradients, master weights and moments."""
    predicted_bytes: dict[str, int] = Field(default_factory=dict)
    """Predicted bytes of the same categories. For `gathered` (gathered parameters) and `messages`
    (buffers of collectives) the prediction is an upper bound."""
    peak_bytes: int | None = None
    """Largest memory of the device's allocator, or on a CPU of the process (resident set)."""


class PlanRow(_Part):
    """A quantity that the planner predicts and the run measures."""

    name: str
    """Name of the quantity."""
    unit: Literal["bytes", "seconds"]
    """Unit of both values."""
    predicted: float | None
    """Predicted value; None = the planner has no measured constants of this device."""
    measured: float
    """Value that rank 0 measured in the first steps."""


class TextSample(_Part):
    """Text that the trained model wrote."""

    prompt: str
    """Beginning of the text, which the model was given."""
    text: str
    """Continuation that the model wrote."""


class RunSummary(_Part):
    """Facts of a run as a whole. A fact that is not known yet is None."""

    model: str = ""
    """Name of the model."""
    parameters: int | None = None
    """Number of parameters of the whole model."""
    layout: Layout | None = None
    """How the model is divided over ranks."""
    ranks: list[RankSummary] = Field(default_factory=list)
    """One entry per rank."""
    precision: str | None = None
    """Compute precision that is used (for `auto`, the precision that was chosen)."""
    device: str | None = None
    """Name of the device as its driver gives it."""
    kernels: str | None = None
    """Implementation of the kernels, and the reason why it was chosen."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of python, torch and megatron-core."""
    total_steps: int | None = None
    """Value of trainer.steps."""
    tokens: int | None = None
    """Number of tokens that the run has trained on."""
    seconds: float | None = None
    """Wall time of the whole run."""
    final_loss: float | None = None
    """Training loss of the last step, in nats per token."""
    initial_validation_loss: float | None = None
    """Validation loss before the first step, in nats per token."""
    validation_loss: float | None = None
    """Last validation loss, in nats per token."""
    validation_bits_per_byte: float | None = None
    """Last validation loss, in bits per byte of text (`BITS_PER_BYTE` in telemetry/metrics.py)."""
    validation_samples: int | None = None
    """Number of samples that a validation reads, each of them once."""
    plan: list[PlanRow] = Field(default_factory=list)
    """Comparison of the planner's predictions with measurements."""
    samples: list[TextSample] = Field(default_factory=list)
    """Text that the model wrote at the end of the run."""
    exit_code: int | None = None
    """Exit code of the run; None = it has not ended, or was killed."""
    exit_reason: str | None = None
    """Why the run ended."""

    def write(self, run_dir: Path) -> Path:
        """Write summary.json, replacing an earlier file atomically.

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
        """Read the summary of a run; return None if the file is absent or damaged."""
        try:
            return cls.model_validate_json((run_dir / SUMMARY_FILE).read_bytes())
        except (OSError, ValidationError):
            return None
