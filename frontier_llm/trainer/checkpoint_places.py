"""Where the checkpoints of a run lie, and the newest of them, told by names alone.

This is for the door, which has not imported torch; frontier_llm/checkpoint looks closer.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from frontier_llm.checkpoint.names import COMMITTED, FOLDER, MANIFEST, parse_folder
from frontier_llm.config.run import RunConfig


def shared_folder(config: RunConfig) -> Path:
    """Return the folder of a run's checkpoints that all nodes share."""
    return Path(config.run.dir) / FOLDER


def local_folder(config: RunConfig, rank: int, ranks_per_node: int) -> Path | None:
    """Return the folder of a run's checkpoints on the disk of a rank's node; None without one.

    Nodes have folders of their own, also where several share a disk, as in a test.
    """
    node = rank // ranks_per_node
    path = config.checkpoint.tiers.local.path
    if path is None:
        return None
    run = Path(config.run.dir).resolve()
    digest = hashlib.sha256(str(run).encode()).hexdigest()[:8]
    return Path(os.path.expandvars(path)) / f"{run.name}-{digest}" / f"node_{node:05d}"


def newest_folder(config: RunConfig) -> Path | None:
    """Return the folder of the newest checkpoint that rank 0's node can see, if there is any."""
    found: list[tuple[int, Path]] = []
    for place in (shared_folder(config), local_folder(config, 0, 1)):
        for path in place.iterdir() if place is not None and place.is_dir() else ():
            parsed = parse_folder(path.name)
            if parsed is not None and parsed[1] in COMMITTED:
                found.append((parsed[0], path))
    return max(found)[1] if found else None


def saved_config(folder: Path) -> dict[str, Any] | None:
    """Return the configuration that made a checkpoint; None where it cannot be read.

    Whoever restores it will say why.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        config: dict[str, Any] = manifest["meta"]["config"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return config
