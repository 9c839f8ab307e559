"""Keep what hydra has read of configuration files: most tests compose, and most files stay.

Hydra reads a file and finds its defaults list again in each composition, which takes two fifths of
the time.
"""

import copy
from pathlib import Path
from typing import Any

from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType

_read: dict[tuple[str, str, tuple[int, int]], Any] = {}
_load = ConfigRepository.load_config


def _load_once(repository: ConfigRepository, config_path: str) -> Any:
    source = repository._find_object_source(config_path, ObjectType.CONFIG)
    if source is None:
        return _load(repository, config_path)
    changed = (0, 0)
    if source.scheme() == "file":
        file = Path(source.path, source._normalize_file_name(config_path)).stat()
        changed = file.st_mtime_ns, file.st_size
    key = source.path, config_path, changed
    if key not in _read:
        _read[key] = _load(repository, config_path)
    return copy.deepcopy(_read[key])


def keep_configs() -> None:
    """Read a file of hydra again only if it has changed."""
    ConfigRepository.load_config = _load_once
