"""Sends the metrics of each step to Weights & Biases (wandb)."""

from pathlib import Path

from frontier_llm.telemetry.metrics import Sink
from frontier_llm.telemetry.trackers import BestEffort, WandbSink
from frontier_llm.trainer.callbacks.sink_callback import SinkCallback


class WeightsAndBiases(SinkCallback):
    """Sends metrics on rank 0. A failure only turns this off. Runs no collectives."""

    def open_sink(self) -> Sink | None:
        """Start a wandb run, unless `telemetry.wandb` is off."""
        config = self.context.config
        mode, project = config.telemetry.wandb, config.telemetry.wandb_project
        if mode == "off":
            return None
        run_dir, values = Path(config.run.dir), config.model_dump(mode="json")
        return BestEffort("wandb", lambda: WandbSink(mode, project, run_dir, values))
