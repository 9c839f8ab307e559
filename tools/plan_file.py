"""A plan as a file of conf/experiment/ that train.py runs."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from frontier_llm.errors import ConfigError
from frontier_llm.planner.estimate import Estimate
from tools.compose import CONF, groups

_FOLDER = CONF / "experiment"
_NOT_SAVED = ("planner", "launch", "run", "plan")


def save_experiment(name: str, overrides: Sequence[str], judged: Estimate) -> Path:
    """Write conf/experiment/NAME.yaml: the overrides, and the layout that was found for them.

    Raises:
        ConfigError: the name is no file name, or is taken by a file that is no plan.
    """
    path = _FOLDER / f"{name}.yaml"
    if not re.fullmatch(r"\w+", name):
        raise ConfigError("--save", name, "letters, digits and _", "choose such a name")
    if path.exists() and "# A plan:" not in path.read_text():
        raise ConfigError("--save", name, "a new name, or that of a plan", "choose another name")
    path.write_text(experiment_text(name, overrides, judged))
    return path


def experiment_text(name: str, overrides: Sequence[str], judged: Estimate) -> str:
    """Write the text of the file."""
    candidate = judged.candidate
    nodes = -(-candidate.grid.size // candidate.grid.ranks_per_node)
    choices, values = _read(overrides)
    choices["collectives"] = candidate.config.collectives.name
    for section, planned in _layout(judged).items():
        values.setdefault(section, {}).update(planned)
    body = {"defaults": [{f"override /{group}": chosen} for group, chosen in choices.items()]}
    recompute = {"recompute": candidate.config.recompute}
    return "\n".join(
        [
            "# @package _global_",
            f"# A plan: {candidate.description}, predicted {judged.time.seconds:.3f} s a step",
            f"# ranks: {candidate.grid.size}",
            f"# run: srun -N {nodes} --ntasks-per-node={candidate.grid.ranks_per_node} "
            f"--gpus-per-task=1 python train.py experiment={name}",
            yaml.safe_dump({**body, **values, **recompute}, sort_keys=False),
        ]
    )


def _layout(judged: Estimate) -> dict[str, dict[str, Any]]:
    candidate = judged.candidate
    parallel, factors = candidate.config.parallel, candidate.factors
    return {
        "parallel": {
            "tensor": parallel.tensor,
            "pipeline": parallel.pipeline,
            "chunks": parallel.chunks,
            "sequence": parallel.sequence,
        },
        "sharding": {
            "name": "planned",
            "params": factors.params,
            "grads": factors.grads,
            "optimizer": factors.optimizer,
        },
        "data": {
            "global_batch": candidate.config.data.global_batch,
            "micro_batch": candidate.config.data.micro_batch,
        },
    }


def _read(overrides: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Sort overrides into choices of groups and values of keys; an experiment's are taken over."""
    choices: dict[str, str] = {}
    values: dict[str, Any] = {}
    for override in overrides:
        key, _, text = override.lstrip("+").partition("=")
        value = yaml.safe_load(text)
        if key == "experiment":
            base = yaml.safe_load((_FOLDER / f"{value}.yaml").read_text())
            for default in base.pop("defaults", []):
                group, chosen = next(iter(default.items()))
                choices[group.removeprefix("override /")] = chosen
            values |= base
        elif key in groups():
            choices[key] = value
        elif key.partition(".")[0] not in _NOT_SAVED:
            _put(values, key.split("."), value)
    choices.pop("sharding", None)  # the plan's own factors take its place
    return choices, {k: v for k, v in values.items() if k not in _NOT_SAVED}


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        values = values.setdefault(part, {})
    values[path[-1]] = value
