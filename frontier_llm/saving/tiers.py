"""Where the checkpoints of a run may lie, and which of them is the newest.

    states -> host memory -> the node's disk -> the run directory -> the archive command
                             the node's disk -> the next node's disk (`checkpoint.partner`)

States are written to the run directory directly if the nodes' disks do not get the step. The
command line uses this module before it imports torch, so checkpoints are recognised only by the
names of their folders. frontier_llm/checkpoint also checks their content.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frontier_llm.checkpoint.folders import COPY, FOLDER, MANIFEST, NODE, committed, superseded
from frontier_llm.config.paths import on_this_node
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.launch.user_folders import find_stranger

RUN_DIRECTORY, NODE_DISK, NEXT_NODE = "the run directory", "the node's disk", "the next node"
"""Names of tiers, also for messages."""


@dataclass(frozen=True)
class Tier:
    """A place for checkpoints of a run, as the ranks of one node use it.

    The run directory and the node's disk get states from memory. The run directory, if both are due
    at a step, and the next node get copies of what is on the node's disk.
    """

    name: str
    folder: Path
    every_steps: int
    keep: int
    """Number of newest checkpoints that are not deleted."""
    keep_every_steps: int | None = None
    """Checkpoints whose step is a multiple of this number are never deleted."""
    is_redundant: bool = False
    """Whether it is of use only if a node is lost. A failure is a warning then."""


def tiers_of(config: RunConfig, node: int = 0, nodes: int = 1) -> list[Tier]:
    """Return the tiers of a run on one of its nodes, also those that only earlier starts used.

    Each node has folders of its own, even if nodes share a disk.
    """
    settings, root = config.checkpoint, local_root(config)
    every, keep = settings.every_steps, settings.keep
    tiers = [Tier(RUN_DIRECTORY, shared_folder(config), every, keep, settings.keep_every_steps)]
    if root is not None:
        every, keep = settings.tiers.local.every_steps, settings.tiers.local.keep
        tiers.append(Tier(NODE_DISK, root / f"{NODE}{node:05d}", every, keep))
        if settings.partner and nodes > 1:
            copies = root / f"{COPY}{(node - 1) % nodes:05d}"
            tiers.append(Tier(NEXT_NODE, copies, every, keep, is_redundant=True))
    return tiers


def deleted_at_resume(config: RunConfig, node: int) -> dict[str, list[Path]]:
    """Return checkpoints that a resume deletes, by the names of tiers in the preflight checks."""
    if config.run.resume == "never":
        return {}
    tiers = zip(("shared", "local"), tiers_of(config, node), strict=False)
    return {
        name: [path for _, path in superseded(tier.folder, tier.keep, tier.keep_every_steps)]
        for name, tier in tiers
    }


def shared_folder(config: RunConfig) -> Path:
    """Return the folder of a run's checkpoints in the run directory."""
    return Path(config.run.dir) / FOLDER


def local_root(config: RunConfig, path: str | None = None) -> Path | None:
    """Return a run's folder on a node's disk, or below another start's `path`; None without one."""
    path = path or config.checkpoint.tiers.local.path
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
    found = [entry for tier in tiers_of(config) for entry in committed(tier.folder)]
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


def saved_meta(folder: Path) -> dict[str, Any] | None:
    """Return what a checkpoint stores besides the states, such as `config`.

    It is None if it cannot be read, as a restore reports.
    """
    try:
        meta: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())["meta"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return meta if isinstance(meta, dict) and "config" in meta else None
