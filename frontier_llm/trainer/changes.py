"""Compares the configuration of a resumed run with the configuration in its checkpoint.

Some keys determine the model, the data or the update rule. A resumed run may change them only if
`run.allow_changes` names them. All other keys may change, for example keys of the layout, the
hardware and the precision, because checkpoints do not depend on them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from frontier_llm.config.decode import defaults
from frontier_llm.config.optimizer import ENDING
from frontier_llm.config.renamed import with_current_names
from frontier_llm.errors import ConfigError

_GUARDED = ("model", "data", "optimizer", "trainer.seed", "trainer.steps")
"""Sections and keys that determine the losses. They may change only if `run.allow_changes` names
them."""
_FREE = (
    "model.name", "data.name", "data.path", "data.directory", "data.micro_batch", "data.workers",
    "data.prefetch",
)  # fmt: skip
"""Keys in the guarded sections that may change, because they do not change the losses."""
_IRRELEVANT = ("run", "callbacks")
"""Sections that are not compared."""

Changes = dict[str, tuple[Any, Any]]
"""(saved value, value in the resumed run) by key."""


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Return (saved value, current value) of every key that differs.

    A key that is absent, because an older version has saved the configuration, has its default.

    Args:
        before: the configuration in the checkpoint, as nested plain values.
        now: the configuration of the resumed run, as nested plain values.
    """
    old, new = (defaults() | dict(_flat(with_current_names(values))) for values in (before, now))
    keys = [key for key in {**old, **new} if not _is_within(key, _IRRELEVANT)]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def refuse(found: Changes, now: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Refuse changes to the data, the model or the update rule, unless they are allowed by name.

    Args:
        found: the changes, as `changes` returns them.
        now: the configuration of the resumed run.
        allowed: keys or groups of keys that may change (`run.allow_changes`).

    Raises:
        ConfigError: some changes are refused. The message names the first of them, and says how to
            allow all of them. The length of packed samples may never change.
    """
    length = "data.sequence_length"
    if length in found and now["data"]["packing"] == "best_fit":
        before, after = found[length]
        raise ConfigError(
            length,
            f"{after} with data.packing=best_fit",
            f"{before}, as in the checkpoint: best_fit packs all documents anew for each length, "
            "so the run would read again what it has read",
            "set it back, or start a new run from the weights: run.init_from=RUN run.dir=NEW_RUN",
        )
    refused = [key for key in found if _is_guarded(key, now) and not _is_within(key, allowed)]
    if not refused:
        return
    before, after = found[refused[0]]
    others = f" (and {len(refused) - 1} more differ)" if len(refused) > 1 else ""
    names = ",".join([*allowed, *refused])
    back = f"repeat the command of the run (its settings are in {now['run']['dir']}/config.yaml)"
    raise ConfigError(
        refused[0],
        f"{after}{others}",
        f"{before}, as in the checkpoint that the run resumes from",
        f"{back if others else 'set it back'}, or allow the change: run.allow_changes=[{names}]",
    )


def _is_guarded(key: str, now: Mapping[str, Any]) -> bool:
    """Return whether a key may change only if it is allowed by name."""
    optimizer = now["optimizer"]
    if key == "trainer.steps":  # schedules that end depend on it unless decay_steps is set
        return optimizer["schedule"] in ENDING and optimizer["decay_steps"] is None
    return _is_within(key, _GUARDED) and not _is_within(key, _FREE)


def _is_within(key: str, names: Sequence[str]) -> bool:
    """Return whether a key is one of the names or lies in a section that they name."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of nested values; the names of a key are joined by dots."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value
