"""Run lm-evaluation-harness on a run: `frontier-llm evaluate RUN_DIR --harness TASKS`.

The harness evaluates a model of transformers, so the weights are converted to a temporary folder.
"""

import tempfile
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from frontier_llm.cli import convert
from frontier_llm.errors import ConfigError

PACKAGES = ("lm_eval", "accelerate")
"""Packages that the harness needs for a model of transformers."""


def run_harness(
    run: Path,
    checkpoint: Path | None,
    tasks: Sequence[str],
    folder: Path | None,
    device: torch.device,
    samples: int,
) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness in fp32, and print its table.

    Args:
        checkpoint: a checkpoint; None: the newest one of the run.
        tasks: names of tasks; `*` stands for any characters.

    Raises:
        ConfigError: the harness is not installed, or has no such task.
        DataError: the model belongs to no family that can be converted.
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    absent = [package for package in PACKAGES if find_spec(package) is None]
    if absent:
        raise ConfigError(
            "--harness",
            f"tasks, but {' and '.join(absent)} cannot be imported",
            "lm-evaluation-harness",
            "pip install lm-eval accelerate; --text measures perplexities without it",
        )
    harness, utils = import_module("lm_eval"), import_module("lm_eval.utils")
    manager = import_module("lm_eval.tasks").TaskManager(include_path=folder and str(folder))
    known = _known(manager, tasks)
    with tempfile.TemporaryDirectory(prefix="frontier_llm_harness_") as name:
        model = Path(name) / "model"
        chosen = () if checkpoint is None else ("--checkpoint", str(checkpoint))
        convert.main(["--to", "hf", "--no-check", *chosen, str(run), str(model)])
        results = harness.simple_evaluate(
            model="hf",
            model_args=f"pretrained={model},dtype=float32",
            tasks=known,
            task_manager=manager,
            batch_size=samples,
            device=str(device),
        )
    print(utils.make_table(results))
    if results.get("groups"):
        print(utils.make_table(results, "groups"))
    found: dict[str, Any] = results["results"]
    return found


def _known(manager: Any, tasks: Sequence[str]) -> list[str]:
    """Return the names of tasks that match.

    Raises:
        ConfigError: there is none for one of them.
    """
    found = []
    for task in tasks:
        matching = manager.match_tasks([task])
        if not matching:
            raise ConfigError(
                "--harness",
                task,
                "the name of a task of lm-evaluation-harness",
                "lm_eval ls tasks lists them; --harness-tasks FOLDER adds your own",
            )
        found += matching
    return found
