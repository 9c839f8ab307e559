"""Write a layout that the planner found as an experiment file, which frontier-llm train can run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from frontier_lab.commands.conf_files import new_conf_file
from frontier_llm.cli.compose import groups
from frontier_llm.cli.group_files import file_choices, file_values
from frontier_llm.cli.package_files import conf_dir_option
from frontier_llm.config.needed import unused
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import Estimate

_NOT_SAVED = ("planner", "launch", "run", "plan")
"""Sections of the configuration that are not saved: they describe the search, or a single run."""


def experiment_file(name: str) -> Path:
    """Return the path to write to: a new file, or one that an earlier plan has written."""
    wants = "letters, digits, - and _: a new name, or that of a saved plan"
    return new_conf_file("experiment", name, "--save", "# A plan:", wants)


def experiment_text(name: str, overrides: Sequence[str], best: Estimate) -> str:
    """Return the content of the experiment's file; `overrides` are the command line of the plan."""
    candidate = best.candidate
    composed = candidate.config.model_dump(mode="json")
    choices, values = _choices_and_values(overrides, composed)
    choices["collectives"] = candidate.config.collectives.name
    data, launch = candidate.config.data, candidate.config.launch
    ranks = {"ranks": candidate.grid.size}
    if launch.ranks_per_node:
        ranks["ranks_per_node"] = launch.ranks_per_node
    planned = {
        "parallel": composed["parallel"],
        "sharding": {"name": "planned", **candidate.factors.by_key},
        "data": {"global_batch": data.global_batch, "micro_batch": data.micro_batch},
        "launch": ranks,
    }
    for section, keys in planned.items():
        values.setdefault(section, {}).update(keys)
    for key in keys_without_effect(candidate):
        section, _, last = key.rpartition(".")
        values.get(section, {}).pop(last, None)
    body = {"defaults": [{f"override /{group}": chosen} for group, chosen in choices.items()]}
    recompute = {"recompute": candidate.config.recompute}
    note = candidate.config.cluster.estimate_note
    seconds = f"{best.time.seconds:.3f} s per step" + (f" ({note})" if note else "")
    return "\n".join(
        [
            "# @package _global_",
            f"# A plan: {candidate.description}, predicted {seconds}",
            f"# ranks: {candidate.grid.size}",
            f"# run: srun -N {candidate.grid.nodes} {_resources(candidate)} "
            f"frontier-llm train {conf_dir_option()}experiment={name}",
            yaml.safe_dump({**body, **values, **recompute}, sort_keys=False),
        ]
    )


def keys_without_effect(candidate: Candidate) -> set[str]:
    """Return the keys that a layout ignores, such as those of a pipeline if there is none.

    A run that sets one of them would be refused.
    """
    planned = candidate.config.changed("sharding", **candidate.factors.by_key)
    return {key for key, _ in unused(planned)}


def _resources(candidate: Candidate) -> str:
    """Return srun's options for the resources of a node, the same as in scripts/*.sbatch."""
    cluster, ranks = candidate.config.cluster, candidate.grid.ranks_per_node
    tasks = f"--ntasks-per-node={ranks} -c {cluster.cores_per_rank}"
    if cluster.device.kind == "hip":
        return f"{tasks} --gpus-per-task=1 --gpu-bind=closest"
    return f"{tasks} --gpus-per-node={ranks}" if cluster.device.kind == "cuda" else tasks


def _choices_and_values(
    overrides: Sequence[str], composed: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Split overrides into chosen files by group, such as `model`, and nested values of keys.

    Both include those of an experiment among the overrides. Values on the command line replace
    those of the experiment, whatever the order of the overrides, because all values are read from
    the composed configuration.
    """
    given = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    choices: dict[str, str] = {}
    values: dict[str, Any] = {}
    if (experiment := given.pop("experiment", "null")) != "null":
        choices = file_choices("experiment", experiment)
        values = file_values("experiment", experiment)
    for key, text in given.items():
        if key.startswith("~"):
            raise ConfigError(
                "--save", key, "keys with values: a file cannot remove a key", f"drop {key}"
            )
        if key in groups():
            choices[key] = yaml.safe_load(text)
        elif key.partition(".")[0] not in _NOT_SAVED:
            _copy(key, composed, values)
    choices.pop("sharding", None)  # replaced by the factors of the plan
    return choices, {k: v for k, v in values.items() if k not in _NOT_SAVED}


def _copy(key: str, source: Mapping[str, Any], target: dict[str, Any]) -> None:
    """Copy the value of a dotted key from `source` to `target`.

    A list is copied as a whole, because a file cannot change a single entry of a list.
    """
    head, _, rest = key.partition(".")
    if rest and isinstance(source[head], dict):
        _copy(rest, source[head], target.setdefault(head, {}))
    else:
        target[head] = source[head]
