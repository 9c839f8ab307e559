"""The section `telemetry`: console lines, metrics and traces of a run."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section


class TelemetryConfig(Section):
    """Where metrics are written. A run always writes metrics.jsonl and report.html."""

    progress: bool
    """Whether a live progress line is shown on a terminal. Otherwise plain lines are printed."""
    console_every_steps: int = Field(ge=1)
    """Steps between two printed lines."""
    wandb: Literal["offline", "online", "off"]
    """Use of Weights & Biases. `offline`: files are written; `online`: metrics are uploaded; `off`:
    not used. Its failures never stop a run."""
    wandb_project: str
    """Name of the project in Weights & Biases."""
    tensorboard: bool
    """Whether TensorBoard event files are written too."""
    trace_from_step: int | None = Field(ge=1)
    """First step that is traced; null = no trace. One rank of each stage writes its trace to
    traces/, and ui.perfetto.dev displays it."""
    trace_steps: int = Field(ge=1)
    """Number of steps to trace."""
