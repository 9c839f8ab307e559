"""How the configuration of a run that goes on differs from the one that saved it.

What decides the data, the model or the update must be the same, or be allowed by name; layout,
hardware, precision and habits may differ: a checkpoint knows nothing of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from frontier_llm.errors import ConfigError

_GUARDED = ("model", "data", "optimizer", "trainer.seed", "trainer.steps")
_FREE = (
    "model.name", "data.name", "data.path", "data.directory", "data.micro_batch",
)  # fmt: skip
_IRRELEVANT = ("run",)

Changes = dict[str, tuple[Any, Any]]


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Return (value before, value now) of every key that differs; absent counts as None.

    Args:
        before: a configuration as nested plain values.
        now: another one.
    """
    old, new = dict(_flat(before)), dict(_flat(now))
    keys = [key for key in {**old, **new} if not _is_of(key, _IRRELEVANT)]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def refuse(found: Changes, now: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Refuse changes to what a run learns from and how, unless they are allowed by name.

    Args:
        found: the changes.
        now: the configuration that is to go on.
        allowed: keys or groups of keys.

    Raises:
        ConfigError: names the first of them, and how to allow all.
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
        f"{before}, as in the checkpoint that the run goes on from",
        f"set it back, or allow it: run.allow_changes=[{names}]",
    )


def _is_guarded(key: str, now: Mapping[str, Any]) -> bool:
    if key == "trainer.steps":  # decides the schedule where nothing else does
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
