"""A plan as a file of conf/experiment/ that train.py runs."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate
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
    composed = candidate.config.model_dump(mode="json")
    choices, values = _read(overrides, composed)
    choices["collectives"] = candidate.config.collectives.name
    for section, planned in _layout(judged, composed).items():
        values.setdefault(section, {}).update(planned)
    body = {"defaults": [{f"override /{group}": chosen} for group, chosen in choices.items()]}
    recompute = {"recompute": candidate.config.recompute}
    return "\n".join(
        [
            "# @package _global_",
            f"# A plan: {candidate.description}, predicted {judged.time.seconds:.3f} s a step",
            f"# ranks: {candidate.grid.size}",
            f"# run: srun -N {nodes} {_resources(candidate)} python train.py experiment={name}",
            yaml.safe_dump({**body, **values, **recompute}, sort_keys=False),
        ]
    )


def _resources(candidate: Candidate) -> str:
    """Return srun's options for a node, as scripts/*.sbatch give them."""
    cluster, ranks = candidate.config.cluster, candidate.grid.ranks_per_node
    tasks = f"--ntasks-per-node={ranks} -c {cluster.cores_per_rank}"
    if cluster.device.kind == "hip":
        return f"{tasks} --gpus-per-task=1 --gpu-bind=closest"
    return f"{tasks} --gpus-per-node={ranks}" if cluster.device.kind == "cuda" else tasks


def _layout(judged: Estimate, composed: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    factors, data = judged.candidate.factors, judged.candidate.config.data
    return {
        "parallel": composed["parallel"],
        "sharding": {
            "name": "planned",
            "params": factors.params,
            "grads": factors.grads,
            "optimizer": factors.optimizer,
        },
        "data": {"global_batch": data.global_batch, "micro_batch": data.micro_batch},
    }


def _read(
    overrides: Sequence[str], composed: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Sort overrides into choices of groups and values of keys; an experiment's are taken over.

    The command line wins over an experiment, wherever that stands: values are those composed.
    """
    chosen = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    choices, values = _of_experiment(yaml.safe_load(chosen.pop("experiment", "null")))
    for key, text in chosen.items():
        if key.startswith("~"):
            raise ConfigError("--save", key, "keys with values: a file removes none", f"drop {key}")
        if key in groups():
            choices[key] = yaml.safe_load(text)
        elif key.partition(".")[0] not in _NOT_SAVED:
            _copy(key, composed, values)
    choices.pop("sharding", None)  # the plan's own factors take its place
    return choices, {k: v for k, v in values.items() if k not in _NOT_SAVED}


def _of_experiment(name: str | None) -> tuple[dict[str, str], dict[str, Any]]:
    if name is None:
        return {}, {}
    values = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text())
    defaults = [next(iter(default.items())) for default in values.pop("defaults", [])]
    return {group.removeprefix("override /"): chosen for group, chosen in defaults}, values


def _copy(key: str, source: Mapping[str, Any], target: dict[str, Any]) -> None:
    """Copy what lies at a dotted key; of a list all, since a file cannot change one entry."""
    head, _, rest = key.partition(".")
    if rest and isinstance(source[head], dict):
        _copy(rest, source[head], target.setdefault(head, {}))
    else:
        target[head] = source[head]
