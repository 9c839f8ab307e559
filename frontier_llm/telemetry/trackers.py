"""Send the metrics of a run to experiment trackers: Weights & Biases and TensorBoard.

Only one rank of a job opens these sinks. The trackers' libraries are imported only when a sink is
opened. wandb in offline mode needs no network.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from frontier_llm.telemetry.metrics import Sink, StepMetrics

_LOG = logging.getLogger(__name__)
_INIT_SECONDS = 30.0
"""Longest time that starting a wandb run may take."""
_FINISH_SECONDS = 60.0
"""Longest time that wandb's upload at the end may take."""


class BestEffort:
    """A sink that contains another sink and is turned off, with a warning, when that sink fails.

    `open_sink` may raise any exception. A failure of a tracker therefore never stops a run.
    """

    def __init__(self, name: str, open_sink: Callable[[], Sink]) -> None:
        self._name = name
        self._sink: Sink | None = None
        self._try(lambda: setattr(self, "_sink", open_sink()))

    def write(self, metrics: StepMetrics) -> None:
        """Write a step, unless the contained sink has failed before."""
        sink = self._sink
        if sink is not None:
            self._try(lambda: sink.write(metrics))

    def close(self) -> None:
        """Close the contained sink, unless it has failed before or is already closed."""
        sink, self._sink = self._sink, None
        if sink is not None:
            self._try(sink.close)

    def _try(self, action: Callable[[], object]) -> None:
        """Call `action`; if it raises, log a warning and turn the sink off."""
        try:
            action()
        except Exception as error:  # a tracker may raise any exception
            self._sink = None
            reason = (str(error).strip() or "no reason given").splitlines()
            _LOG.warning(
                "%s is off for the rest of this run: %s: %s",
                self._name,
                type(error).__name__,
                " ".join(line.strip() for line in reason[:3]),
            )


class WandbSink:
    """Logs every step to a Weights & Biases run that is named after the run directory.

    In mode `offline` files are written below the run directory; `online` uploads. All methods may
    raise any exception of wandb. `BestEffort` handles them.
    """

    def __init__(
        self,
        mode: Literal["offline", "online"],
        project: str,
        run_dir: Path,
        run_config: Mapping[str, Any],
    ) -> None:
        import wandb

        if mode == "online" and not wandb.api.api_key:
            # wandb would ask on the terminal, and all ranks would wait for the answer
            raise RuntimeError("no API key: run `wandb login`, or set WANDB_API_KEY")
        # silence wandb, and limit how long it may block
        settings: dict[str, Any] = {"silent": True, "console": "off"}
        settings["init_timeout"] = _INIT_SECONDS
        if "finish_timeout" in getattr(wandb.Settings, "model_fields", {}):
            settings["finish_timeout"] = _FINISH_SECONDS
        self._run = wandb.init(
            project=project,
            dir=str(run_dir),
            mode=mode,
            id=run_id(run_dir),
            name=run_dir.resolve().name,
            config=dict(run_config),
            resume={"offline": None, "online": "allow"}[mode],
            settings=wandb.Settings(**settings),
        )
        written = Path(self._run.settings.sync_dir)
        if run_dir.resolve() not in written.resolve().parents:
            _LOG.warning("wandb cannot write below %s and writes to %s instead", run_dir, written)

    def write(self, metrics: StepMetrics) -> None:
        """Log a step under the names that metrics.jsonl uses."""
        self._run.log(metrics.scalars(), step=metrics.step)

    def close(self) -> None:
        """Finish the run; in online mode, wait up to a minute for the upload."""
        import wandb

        self._run.finish()
        wandb.teardown()  # waits for wandb's service, which writes the file after `finish` returns


class TensorBoardSink:
    """Writes every number of a step as a scalar to event files in `tensorboard/`.

    All methods may raise any exception of torch and tensorboard. `BestEffort` handles them.
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
        """Write the data that are still in memory."""
        self._writer.close()


def run_id(run_dir: Path) -> str:
    """Return the wandb id of a run directory: its name and a digest of its path."""
    path = run_dir.resolve()
    name = re.sub(r"[^A-Za-z0-9_-]", "-", path.name)[:64]
    return f"{name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
