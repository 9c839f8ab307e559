"""What a run needs before its ranks are started again in the same run directory."""

import json
import os
from pathlib import Path

from frontier_llm.config.run import RunConfig
from frontier_llm.telemetry.jsonl import METRICS_FILE
from frontier_llm.trainer.checkpoint_places import newest_folder
from frontier_llm.trainer.run_directory import check_new

_TAIL_BYTES = 1 << 16
"""How much of the end of a record is read at first."""


def prepare_restart(config: RunConfig) -> RunConfig:
    """Prepare the run directory of a run that failed, and return the configuration of the restart.

    The restart resumes from the newest checkpoint. If the run has saved nothing, its records are
    set aside, and it starts from the beginning.

    Raises:
        FrontierError: a file cannot be renamed.
    """
    has_local_level = config.checkpoint.tiers.local.path is not None
    if newest_folder(config) is None and not has_local_level:
        check_new(Path(config.run.dir), "auto", started_again=True)
    run = config.run.model_copy(update={"resume": "auto"})
    return config.model_copy(update={"run": run})


def recorded_steps(run: Path) -> int:
    """Return the last step of which a run has a record; 0 if there is none.

    Reads from the end of the file, since a long run has a record of gigabytes.
    """
    try:
        with (run / METRICS_FILE).open("rb") as file:
            start = file.seek(0, os.SEEK_END)
            tail = b""  # begins at `start`
            while start:
                size = min(start, max(_TAIL_BYTES, len(tail)))
                start = file.seek(start - size)
                tail = file.read(size) + tail
                for line in reversed(tail.splitlines()[bool(start) :]):  # the first may be cut
                    if (step := _step(line)) is not None:
                        return step
    except OSError:
        pass
    return 0


def _step(line: bytes) -> int | None:
    """Return the step of a record; None if the run was killed while it wrote the line."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None
