"""TensorBoard event files: the one door to `tensorboard`."""

from pathlib import Path

from frontier_llm.telemetry.metrics import StepMetrics


class TensorBoardSink:
    """Writes every number of a step as a scalar.

    Raises whatever torch and tensorboard raise: `sinks.BestEffort` stands between.
    """

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def write(self, metrics: StepMetrics) -> None:
        """Add a step under the names that metrics.jsonl uses."""
        for name, value in metrics.scalars().items():
            if name != "step":
                self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        """Write what is still in memory."""
        self._writer.close()
