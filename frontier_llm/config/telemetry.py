"""What a run says about itself."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section


class TelemetryConfig(Section):
    """Sinks of the metrics. metrics.jsonl and report.html are always written."""

    progress: bool
    """Show a live progress line on a terminal (plain lines otherwise)."""
    console_every_steps: int = Field(ge=1)
    """Steps between two printed lines."""
    wandb: Literal["offline", "online", "off"]
    """Weights & Biases: offline files, live upload, or nothing. Never stops a run."""
    wandb_project: str
    """Project that the runs belong to."""
    tensorboard: bool
    """Also write TensorBoard event files."""
    trace_from_step: int | None = Field(ge=1)
    """First step of a trace, written to traces/ by one rank of each stage; null = none. Open it at
    ui.perfetto.dev."""
    trace_steps: int = Field(ge=1)
    """Steps that are traced."""
