"""What a run needs before its ranks are started again in the same run directory."""

import json
from pathlib import Path

from frontier_llm.config.run import RunConfig
from frontier_llm.telemetry.jsonl import METRICS_FILE
from frontier_llm.trainer.checkpoint_places import newest_folder
from frontier_llm.trainer.run_directory import check_new


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
    """Return the last step of which a run has a record; 0 if there is none."""
    try:
        lines = (run / METRICS_FILE).read_bytes().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue  # the run was killed while it wrote this line
    return 0
