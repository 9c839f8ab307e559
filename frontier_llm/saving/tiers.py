"""Where the checkpoints of a run are, and which of them is the newest.

The command line uses this module before it imports torch, so checkpoints are recognised only by the
names of their folders. frontier_llm/checkpoint also checks their content.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from frontier_llm.checkpoint.folders import COMMITTED, COPY, FOLDER, MANIFEST, NODE, parse_folder
from frontier_llm.config.paths import on_this_node
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.launch.user_folders import find_stranger


def shared_folder(config: RunConfig) -> Path:
    """Return the folder of a run's checkpoints in the run directory."""
    return Path(config.run.dir) / FOLDER


def local_folder(config: RunConfig, rank: int, ranks_per_node: int) -> Path | None:
    """Return the folder of a run's checkpoints on the local disk of a rank's node.

    Each node has another folder, even if nodes share a disk. None if the run writes no node-local
    checkpoints (`checkpoint.tiers.local.path`).
    """
    root = local_root(config)
    return None if root is None else root / f"{NODE}{rank // ranks_per_node:05d}"


def partner_folder(config: RunConfig, node: int) -> Path:
    """Return the folder on the next node's disk with copies of a node's checkpoints."""
    root = local_root(config)
    assert root is not None
    return root / f"{COPY}{node:05d}"


def local_root(config: RunConfig) -> Path | None:
    """Return the folder of a run on the local disk of a node; None without local checkpoints."""
    path = config.checkpoint.tiers.local.path
    if path is None:
        return None
    run = Path(config.run.dir).resolve()
    digest = hashlib.sha256(str(run).encode()).hexdigest()[:8]
    return on_this_node(path) / f"{run.name}-{digest}"


def newest_folder(config: RunConfig) -> Path | None:
    """Return the newest checkpoint in the run directory or on rank 0's node; None without one.

    Raises a ConfigError if another user could have written the checkpoints on the node.
    """
    _refuse_strangers(config)
    found: list[tuple[int, Path]] = []
    for parent in (shared_folder(config), local_folder(config, 0, 1)):
        for path in parent.iterdir() if parent is not None and parent.is_dir() else ():
            parsed = parse_folder(path.name)
            if parsed is not None and parsed[1] in COMMITTED:
                found.append((parsed[0], path))
    return max(found)[1] if found else None


def _refuse_strangers(config: RunConfig) -> None:
    root = local_root(config)
    if root is not None and os.path.lexists(root) and (problem := find_stranger(root)):
        raise ConfigError(
            "checkpoint.tiers.local.path",
            problem,
            "a folder that only this user can write, because the states in it are trained on",
            "remove it, or set checkpoint.tiers.local.path (or recovery.copies_path) to a folder "
            "of your own",
        )


def saved_config(folder: Path) -> dict[str, Any] | None:
    """Return the configuration in a checkpoint; None if it cannot be read, as a restore reports."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        config: dict[str, Any] = manifest["meta"]["config"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return config
