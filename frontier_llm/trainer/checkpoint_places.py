"""The folders of a run's checkpoints, and the newest checkpoint, found by folder names alone.

This module is used before torch is imported. frontier_llm/checkpoint also checks the contents.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from frontier_llm.checkpoint.folders import COMMITTED, FOLDER, MANIFEST, parse_folder
from frontier_llm.config.run import RunConfig


def shared_folder(config: RunConfig) -> Path:
    """Return the folder of a run's checkpoints in the run directory."""
    return Path(config.run.dir) / FOLDER


def local_folder(config: RunConfig, rank: int, ranks_per_node: int) -> Path | None:
    """Return the folder of a run's checkpoints on the local disk of a rank's node.

    Returns:
        A different folder for each node, even if nodes share a disk; None without a local tier.
    """
    node = rank // ranks_per_node
    path = config.checkpoint.tiers.local.path
    if path is None:
        return None
    run = Path(config.run.dir).resolve()
    digest = hashlib.sha256(str(run).encode()).hexdigest()[:8]
    return Path(os.path.expandvars(path)) / f"{run.name}-{digest}" / f"node_{node:05d}"


def newest_folder(config: RunConfig) -> Path | None:
    """Return the folder of the newest checkpoint on rank 0's node; None if there is none."""
    found: list[tuple[int, Path]] = []
    for place in (shared_folder(config), local_folder(config, 0, 1)):
        for path in place.iterdir() if place is not None and place.is_dir() else ():
            parsed = parse_folder(path.name)
            if parsed is not None and parsed[1] in COMMITTED:
                found.append((parsed[0], path))
    return max(found)[1] if found else None


def saved_config(folder: Path) -> dict[str, Any] | None:
    """Return the configuration that a checkpoint was saved with; None if it cannot be read.

    The reason is reported when the checkpoint is restored.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        config: dict[str, Any] = manifest["meta"]["config"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return config
