"""Define summary.json: the facts of a run as a whole, and how the run ended.

trainer/callbacks/run_report.py writes the file, and the report reads it. The numbers of the steps
are in metrics.jsonl.
"""

import math
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import Self

from frontier_llm.atomic_files import replace_text
from frontier_llm.errors import TrainingError, file_failure
from frontier_llm.telemetry.jsonl import LARGEST

SUMMARY_FILE = "summary.json"
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_Number = Annotated[
    float, AfterValidator(lambda value: value if abs(value) <= LARGEST else math.nan)
]
"""A number that a chart can show; others become NaN."""
_Layer = Annotated[int, Field(ge=-1, lt=1 << 31)]
_Ranks = Annotated[int, Field(ge=1, le=1 << 24)]
_Stages = Annotated[int, Field(ge=1, le=4096)]


class Part(BaseModel):
    """Base of the classes of JSON files. Unknown keys, of other versions, are ignored."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", use_attribute_docstrings=True, ser_json_inf_nan="null"
    )


class RunFile(Part):
    """A JSON file of a run directory, which is replaced atomically."""

    file_name: ClassVar[str]

    def write(self, run_dir: Path) -> Path:
        """Write the file; return its path.

        Raises a TrainingError if it cannot be written.
        """
        path = run_dir / self.file_name
        try:
            replace_text(path, self.model_dump_json(indent=1) + "\n")
        except OSError as error:
            raise TrainingError(file_failure(path, "written", error)) from error
        return path

    @classmethod
    def read(cls, run_dir: Path) -> Self | None:
        """Read the file of a run; return None if it is absent or damaged."""
        try:
            path = run_dir / cls.file_name
            return cls.model_validate_json(path.read_bytes() if path.is_file() else b"")
        except (OSError, ValidationError):
            return None


class Layout(Part):
    """How the model is divided over ranks."""

    tensor: _Ranks = 1
    """Number of tensor-parallel ranks, among which each matrix is divided."""
    pipeline: _Stages = 1
    chunks: _Stages = 1
    """Number of model chunks per stage; more than 1 if stages are interleaved."""
    head_stage: _Count | None = None
    """Stage with the output layer; None = the last one."""
    data: _Ranks = 1
    sequence: bool = False
    ranks_per_node: _Count = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data


class RankSummary(Part):
    """One rank: its coordinates in the layout, and its memory."""

    rank: _Count
    host: str = ""
    tensor: _Count = 0
    data: _Count = 0
    pipeline: _Count = 0
    layers: list[tuple[_Layer, _Layer]] = Field(default_factory=list)
    """First and last layer of each model chunk, both included."""
    memory_bytes: dict[str, _Count] = Field(default_factory=dict)
    """Allocated bytes by category, such as parameters, gradients, master weights and moments."""
    predicted_bytes: dict[str, _Count] = Field(default_factory=dict)
    """Predicted bytes of the same categories. For `gathered` (gathered parameters) and `messages`
    (buffers of collectives) the prediction is an upper bound."""
    peak_bytes: _Count | None = None
    """Largest memory of the device's allocator, or on a CPU of the process (resident set)."""


class PlanRow(Part):
    """A quantity that the planner predicts and the run measures."""

    name: str
    unit: Literal["bytes", "seconds"]
    predicted: _Number | None
    """Predicted value; None = the planner has no measured constants of this device."""
    measured: _Number
    """Value that rank 0 measured in the first steps."""


class TextSample(Part):
    """Text that the trained model wrote."""

    prompt: str
    text: str


class RunSummary(RunFile):
    """Facts of a run as a whole. A fact that is not known yet is None."""

    file_name: ClassVar[str] = SUMMARY_FILE

    model: str = ""
    parameters: _Count | None = None
    layout: Layout | None = None
    ranks: list[RankSummary] = Field(default_factory=list)
    precision: str | None = None
    """Compute precision that is used (for `auto`, the precision that was chosen)."""
    device: str | None = None
    """Name of the device as its driver gives it."""
    kernels: str | None = None
    """Implementation of the kernels, and the reason why it was chosen."""
    versions: dict[str, str] = Field(default_factory=dict)
    total_steps: _Count | None = None
    tokens: _Count | None = None
    seconds: _Number | None = None
    """Sum of `StepMetrics.step_seconds` over all steps, also those of earlier starts of the run."""
    final_loss: _Number | None = None
    """Training loss of the last step, in nats per token."""
    initial_validation_loss: _Number | None = None
    """Validation loss before the first step that follows `validation_since`, in nats per token."""
    validation_since: _Count = 0
    """Step of the last start with other samples of the validation: earlier losses are not of the
    same text."""
    validation_loss: _Number | None = None
    """Last validation loss, in nats per token."""
    validation_step: _Count | None = None
    """Step of the last validation."""
    validation_bits_per_byte: _Number | None = None
    """Last validation loss, in bits per byte of text (`BITS_PER_BYTE` in telemetry/metrics.py)."""
    validation_samples: _Count | None = None
    """Number of samples that a validation reads, each of them once."""
    plan: list[PlanRow] = Field(default_factory=list)
    samples: list[TextSample] = Field(default_factory=list)
    exit_code: Annotated[int, Field(ge=-(1 << 31), lt=1 << 32)] | None = None
    """Exit code of the run; None = it has not ended, or was killed."""
    exit_reason: str | None = None
