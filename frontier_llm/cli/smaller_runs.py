"""Refuse a run that does not fit in memory, and name optimizers and smaller models that do."""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from typing import Any

from frontier_llm.cli.compose import compose, fitted, groups
from frontier_llm.cli.group_files import file_values
from frontier_llm.config import RunConfig, decode
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.choice import choose
from frontier_llm.planner.fit_check import Changes, check_fits

RECOMPUTE = ("none", "selective", "full")
"""Values of `recompute`, in the order of the work that they add."""
SHARES = (1, 4)
"""For each of these numbers, the largest model with at most 1/number of the parameters is named."""


def check_run(candidate: Candidate, values: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Refuse a run that does not fit in memory.

    Raises:
        ConfigError: it does not fit. The message names changes, each with the memory of a run whose
            command line has this change.
    """

    def composed(change: str, ranks: int) -> RunConfig:
        keys = {word.partition("=")[0] for word in change.split()}
        kept = [word for word in overrides if word.lstrip("+").partition("=")[0] not in keys]
        with redirect_stderr(io.StringIO()):  # what is chosen for a run that is not started
            changed = fitted(compose([*kept, *change.split()]), ranks)
        return choose(decode(changed), ranks, candidate.grid.ranks_per_node)

    check_fits(candidate, smaller_runs(values, overrides), composed)


def smaller_runs(values: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[Changes]:
    """Yield groups of changes; in each group, those that change a run least come first.

    There is a group for each other optimizer, with more and more recomputation, and two for smaller
    models of the same design, the largest first. There are none for an experiment, nor of a
    section of which the command line sets keys: these keys may not suit another file.
    """
    given = [override.lstrip("+").partition("=")[0] for override in overrides]
    sections = {key.partition(".")[0] for key in given if "." in key}
    if "experiment" in given:
        return
    config = decode(values)
    if "optimizer" not in sections:
        for name in groups()["optimizer"]:
            yield _other_optimizer(values, config, name)
    if "model" not in sections:
        yield from (_smaller_models(values, config, share) for share in SHARES)


def _other_optimizer(values: Mapping[str, Any], config: RunConfig, name: str) -> Changes:
    for recompute in RECOMPUTE[RECOMPUTE.index(config.recompute) :]:
        more = "" if recompute == config.recompute else f" recompute={recompute}"
        changed = _changed(values, "optimizer", name, recompute=recompute)
        if changed and changed.optimizer.name != config.optimizer.name:
            yield f"optimizer={name}{more}", changed


def _smaller_models(values: Mapping[str, Any], config: RunConfig, share: int) -> Changes:
    """Yield the smaller models with the same positions, norms and activations."""
    found = {name: _changed(values, "model", name) for name in groups()["model"]}
    sizes = {name: (_size(changed), changed) for name, changed in found.items() if changed}
    for name, (size, changed) in sorted(sizes.items(), key=lambda item: -item[1][0]):
        if size < _size(config) / share and _design(changed) == _design(config):
            yield f"model={name}", changed


def _size(config: RunConfig) -> int:
    return count_parameters(config.model, config.data.sequence_length)


def _design(config: RunConfig) -> tuple[str, ...]:
    model = config.model
    return model.kind, model.positions, model.norm, model.activation


def _changed(values: Mapping[str, Any], group: str, name: str, **others: str) -> RunConfig | None:
    """Return the configuration with another file of a group; None if the file is incomplete."""
    try:
        return decode({**values, group: file_values(group, name), **others})
    except ConfigError:  # a base of other files
        return None
