"""Weights & Biases: the one door to `wandb`. Written offline, it needs no network.

One run a job: the rank that owns the metrics opens it.
"""

import hashlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from frontier_llm.telemetry.metrics import StepMetrics

_LOG = logging.getLogger(__name__)
_INIT_SECONDS = 30.0
_FINISH_SECONDS = 60.0


class WandbSink:
    """Logs every step to a run named after the run directory.

    Raises whatever wandb raises: `sinks.BestEffort` stands between it and the training.
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
        self._run = wandb.init(
            project=project,
            dir=str(run_dir),
            mode=mode,
            id=run_id(run_dir),
            name=run_dir.resolve().name,
            config=dict(run_config),
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(**_settings(wandb)),
        )
        written = Path(self._run.settings.sync_dir)
        if run_dir.resolve() not in written.resolve().parents:
            _LOG.warning("wandb writes to %s: %s is no place for it", written, run_dir)

    def write(self, metrics: StepMetrics) -> None:
        """Log a step under the names that metrics.jsonl uses."""
        self._run.log(metrics.scalars(), step=metrics.step)

    def close(self) -> None:
        """Finish the run; online, wait a while for the upload."""
        import wandb

        self._run.finish()
        wandb.teardown()  # its service writes the file's end after `finish` has returned


def run_id(run_dir: Path) -> str:
    """Return the wandb id of a run directory: its name and a digest of where it lies."""
    path = run_dir.resolve()
    name = re.sub(r"[^A-Za-z0-9_-]", "-", path.name)[:64]
    return f"{name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def _settings(wandb: Any) -> dict[str, Any]:
    """Quiet, and never for ever."""
    settings = {"silent": True, "console": "off", "init_timeout": _INIT_SECONDS}
    if "finish_timeout" in getattr(wandb.Settings, "model_fields", {}):
        settings["finish_timeout"] = _FINISH_SECONDS
    return settings
