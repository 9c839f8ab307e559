"""The output of a run: console lines, metrics and traces."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section


class TelemetryConfig(Section):
    """Where metrics are written; metrics.jsonl and report.html are always written."""

    progress: bool
    """Show a live progress line on a terminal; without a terminal, plain lines are printed."""
    console_every_steps: int = Field(ge=1)
    """Steps between two printed lines."""
    wandb: Literal["offline", "online", "off"]
    """Weights & Biases: `offline` writes files, `online` uploads; failures never stop a run."""
    wandb_project: str
    """Project of Weights & Biases."""
    tensorboard: bool
    """Also write TensorBoard event files."""
    trace_from_step: int | None = Field(ge=1)
    """First step of a trace, which one rank of each stage writes to traces/; null = no trace.
    ui.perfetto.dev shows it."""
    trace_steps: int = Field(ge=1)
    """Number of steps to trace."""
