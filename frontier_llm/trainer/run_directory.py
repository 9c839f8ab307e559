"""The folder of one run: claimed once, with the configuration that made it."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from frontier_llm.errors import ConfigError, FrontierError

CONFIG = "config.yaml"
FAILURES = "failures"
_SIGNS_OF_A_RUN = (CONFIG, "metrics.jsonl")


def claim(path: Path) -> None:
    """Make the folder of a run; refuse one that holds another run.

    Raises:
        ConfigError: on run.dir: a run is there already, or a file is in the way.
        FrontierError: the folder cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".writable").touch()
        (path / ".writable").unlink()
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(
            "run.dir", path, "a folder: a file is in the way", "choose another run.dir"
        ) from None
    except OSError as error:
        raise _not_writable(path, error) from None
    found = [name for name in _SIGNS_OF_A_RUN if (path / name).exists()]
    if found:
        raise _used(path, found[0])


def write_config(path: Path, text: str) -> None:
    """Write `config.yaml` and its digest `config.yaml.sha256` (as sha256sum writes it).

    Raises:
        ConfigError: another run claimed the folder meanwhile.
        FrontierError: the files cannot be written.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()
    try:
        with (path / CONFIG).open("x") as file:
            file.write(text)
        (path / f"{CONFIG}.sha256").write_text(f"{digest}  {CONFIG}\n")
    except FileExistsError:
        raise _used(path, CONFIG) from None
    except OSError as error:
        raise _not_writable(path, error) from None


def to_yaml(values: Mapping[str, Any]) -> str:
    """Write composed values as YAML, in the order of `conf/`."""
    text: str = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
    return text


def from_yaml(text: str) -> dict[str, Any]:
    """Read what `to_yaml` wrote."""
    values: dict[str, Any] = yaml.safe_load(text)
    return values


def _used(path: Path, sign: str) -> ConfigError:
    return ConfigError(
        "run.dir",
        path,
        f"a new folder: this one holds a run already ({sign})",
        "choose another run.dir, or remove that folder if nobody needs it",
    )


def _not_writable(path: Path, error: OSError) -> FrontierError:
    return FrontierError(
        f"the run directory {path} cannot be written ({error.strerror}): choose another run.dir, "
        "or ask for the permission"
    )
