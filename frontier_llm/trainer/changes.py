"""Compares the configuration of a resumed run with that of the run that saved the checkpoint.

Keys that decide the data, the model or the update must be the same, or be allowed by name. Keys of
the layout, the hardware, the precision and the like may differ, because checkpoints do not depend
on them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from frontier_llm.config.renamed import with_current_names
from frontier_llm.errors import ConfigError

_GUARDED = ("model", "data", "optimizer", "trainer.seed", "trainer.steps")
"""Sections and keys that determine the losses: a resumed run may change them only if allowed."""
_FREE = (
    "model.name", "data.name", "data.path", "data.directory", "data.micro_batch",
)  # fmt: skip
"""Keys in these sections that may change, because they do not change the losses."""
_IRRELEVANT = ("run", "callbacks")
"""Sections that are not compared."""

Changes = dict[str, tuple[Any, Any]]


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Return (value before, value now) of every key that differs; an absent key counts as None.

    Args:
        before: the saved configuration as nested plain values.
        now: the configuration of the resumed run, likewise.
    """
    old, new = (dict(_flat(with_current_names(values))) for values in (before, now))
    keys = [key for key in {**old, **new} if not _is_of(key, _IRRELEVANT)]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def refuse(found: Changes, now: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Refuse changes to the data, the model or the update, unless they are allowed by name.

    Args:
        found: the changes.
        now: the configuration of the resumed run.
        allowed: keys or groups of keys (`run.allow_changes`).

    Raises:
        ConfigError: names the first refused key, and how to allow all of them.
    """
    refused = [key for key in found if _is_guarded(key, now) and not _is_of(key, allowed)]
    if not refused:
        return
    before, wanted = found[refused[0]]
    others = f" (and {len(refused) - 1} more differ)" if len(refused) > 1 else ""
    names = ",".join([*allowed, *refused])
    raise ConfigError(
        refused[0],
        f"{wanted}{others}",
        f"{before}, as in the checkpoint that the run resumes from",
        f"set it back, or allow it: run.allow_changes=[{names}]",
    )


def _is_guarded(key: str, now: Mapping[str, Any]) -> bool:
    if key == "trainer.steps":  # the learning rate depends on it unless decay_steps is set
        return now["optimizer"]["decay_steps"] is None
    return _is_of(key, _GUARDED) and not _is_of(key, _FREE)


def _is_of(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value
