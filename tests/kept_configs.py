"""Keep what was read of configuration files: most tests compose, and most files stay.

Hydra reads the files, finds their order and merges them again in each composition, although most
compositions choose the same files and differ in single keys, which hydra sets after the merge. The
check for mistakes in the chosen files reads them once more.
"""

import pickle
from pathlib import Path
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides, create_defaults_list
from hydra.core.object_type import ObjectType

from frontier_llm.cli import group_files, machine_defaults
from frontier_llm.cli.package_files import conf_file, conf_folders

_read: dict[tuple[Any, ...], bytes] = {}
_load = ConfigRepository.load_config
_load_file = group_files.load_file
_merge = ConfigLoaderImpl._compose_config_from_defaults_list
_lists: dict[tuple[Any, ...], DefaultsList] = {}
_merged: dict[int, bytes] = {}
"""Merged files by the identity of their list of defaults, which `_lists` keeps."""


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
        _read[key] = pickle.dumps(_load(repository, config_path))
    return pickle.loads(_read[key])


def _load_file_once(group: str, name: str) -> dict[str, Any]:
    path = conf_file(group, name)
    if not path.is_file():
        return _load_file(group, name)
    key = path, _state(path)
    if key not in _read:
        _read[key] = pickle.dumps(_load_file(group, name))
    return pickle.loads(_read[key])


def _order_once(repo: Any, config_name: Any, overrides_list: Any, **options: Any) -> DefaultsList:
    """Return the list of defaults of a composition that chose the same files before."""
    choices = [o for o in overrides_list if repo.group_exists(o.key_or_group)]
    files = [file for folder in conf_folders() for file in sorted(folder.rglob("*.yaml"))]
    states = tuple((file, _state(file)) for file in files)
    lines = tuple(choice.input_line for choice in choices)
    machine = machine_defaults.cluster_of_this_machine()  # conf/cluster/auto.yaml builds on it
    key = (config_name, lines, states, machine, *sorted(options.items()))
    if key not in _lists:
        _lists[key] = create_defaults_list(repo, config_name, overrides_list, **options)
        return _lists[key]
    before = _lists[key]
    overrides = Overrides(repo=repo, overrides_list=overrides_list)
    overrides.known_choices = dict(before.overrides.known_choices)
    return DefaultsList(
        before.defaults, before.defaults_tree, overrides.config_overrides, overrides
    )


def _merge_once(loader: ConfigLoaderImpl, defaults: Any, repo: Any) -> Any:
    key = id(defaults)
    if key not in _merged:
        merged = _merge(loader, defaults, repo)
        if any(before.defaults is defaults for before in _lists.values()):
            _merged[key] = pickle.dumps(merged)
        return merged
    return pickle.loads(_merged[key])


def keep_configs() -> None:
    """Read, order and merge files again only if one of them has changed."""
    config_loader_impl.create_defaults_list = _order_once
    ConfigLoaderImpl._compose_config_from_defaults_list = _merge_once
    ConfigRepository.load_config = _load_once
    group_files.load_file = _load_file_once
