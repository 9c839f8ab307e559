"""Keep what was read of configuration files: most tests compose, and most files stay.

Hydra reads a file and finds its defaults list again in each composition, which takes two fifths of
the time; the check for mistakes in the chosen files reads them once more.
"""

import copy
from pathlib import Path
from typing import Any

from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType

from frontier_llm.cli import group_files
from frontier_llm.cli.package_files import conf_file

_read: dict[tuple[Any, ...], Any] = {}
_load = ConfigRepository.load_config
_load_file = group_files.load_file


def _state(path: Path) -> tuple[int, int]:
    """Return what changes if a file does."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def _load_once(repository: ConfigRepository, config_path: str) -> Any:
    source = repository._find_object_source(config_path, ObjectType.CONFIG)
    if source is None:
        return _load(repository, config_path)
    changed = (0, 0)
    if source.scheme() == "file":
        changed = _state(Path(source.path, source._normalize_file_name(config_path)))
    key = source.path, config_path, changed
    if key not in _read:
        _read[key] = _load(repository, config_path)
    return copy.deepcopy(_read[key])


def _load_file_once(group: str, name: str) -> dict[str, Any]:
    path = conf_file(group, name)
    if not path.is_file():
        return _load_file(group, name)
    key = path, _state(path)
    if key not in _read:
        _read[key] = _load_file(group, name)
    return copy.deepcopy(_read[key])


def keep_configs() -> None:
    """Read a file again only if it has changed."""
    ConfigRepository.load_config = _load_once
    group_files.load_file = _load_file_once
