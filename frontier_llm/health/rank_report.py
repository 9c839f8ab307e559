"""The report of a rank at start-up, and its transfer to rank 0 through torch's key-value store.

Rank 0 checks the reports before the model is built (preflight.py).
"""

import hashlib
import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm.config.run import RunConfig
from frontier_llm.device import identity
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.errors import LaunchError
from frontier_llm.launch.coordination import read_all
from frontier_llm.launch.rendezvous import RankZeroLostError
from frontier_llm.launch.user_folders import find_stranger
from frontier_llm.launch.world import World

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_KEY = "preflight/report"
"""Prefix of the keys in the store. `/N`: report of rank N. `/clock/N`: time on rank N. `/all`: set
when all ranks have reported. The prefix itself: number of ranks that have reported."""
_BLOCK_BYTES = 512
"""Unit in which the kernel counts the blocks of a file."""


@dataclass(frozen=True)
class RankReport:
    """The host, device, software and configuration of one rank."""

    rank: int
    host: str
    device: str
    """Identifier of the device, unique on its host; empty on a CPU."""
    device_name: str
    kind: str
    """`cpu`, `cuda` or `hip`."""
    interfaces: tuple[str, ...]
    """Network interfaces of the host that are up."""
    cores: str
    """Cores on which the rank may run, as ranges: `0-6,64-70`."""
    digest: str
    """SHA-256 of the configuration."""
    versions: dict[str, str]
    environment: dict[str, str]
    """Environment variables that control communication."""
    folders: dict[str, str]
    """Output folders by tier: `shared` for all nodes, `local` for this node. Only rank 0 reports
    the shared folder, and only the first rank of each node reports a node-local folder."""
    free_bytes: dict[str, int]
    """Free bytes by tier, and what copies in memory that this run replaces already take there."""
    stranger: str = ""
    """Why other users could read or exchange node-local checkpoints; empty if they cannot."""
    clock_seconds: float = 0.0
    """Time of the host in seconds since 1970, read at nearly the same moment on all ranks."""

    @classmethod
    def of(
        cls,
        config: RunConfig,
        world: World,
        accelerator: Accelerator,
        local: Path | None = None,
    ) -> "RankReport":
        """Describe this rank; `local`, the folder of checkpoints on this node, is made if missing."""
        folders, stranger = {}, ""
        if world.rank == 0:
            folders["shared"] = Path(config.run.dir).absolute()
        if local is not None and world.rank % world.ranks_per_node == 0:
            folders["local"] = local
            stranger = find_stranger(local)
        free = {tier: free_bytes(folder) for tier, folder in folders.items()}
        if local is not None and "local" in folders and config.recovery.partner_copies:
            free["local"] += used_bytes(local)
        return cls(
            rank=world.rank,
            host=world.host,
            device=identity.device_id(accelerator),
            device_name=accelerator.name,
            kind=accelerator.kind,
            interfaces=identity.interfaces(),
            cores=identity.cores(),
            digest=hashlib.sha256(config.model_dump_json().encode()).hexdigest(),
            versions=identity.versions(),
            environment=identity.variables(os.environ, config.cluster.environment),
            folders={tier: str(folder) for tier, folder in folders.items()},
            free_bytes=free,
            stranger=stranger,
        )


def exchange(
    report: RankReport, world: World, store: "Store", timeout: timedelta
) -> list[RankReport]:
    """Send the report of every rank to rank 0; return all there, in order, and else only the own.

    Collective over all ranks, through the store. A rank makes four store operations, and rank 0
    makes two more. Raises LaunchError on rank 0 if some ranks did not report within the time limit;
    the message names these ranks and their hosts.
    """
    store.set(f"{_KEY}/{report.rank}", json.dumps(asdict(report)))
    if store.add(_KEY, 1) == world.size:
        store.set(f"{_KEY}/all", "")
    try:
        store.wait([f"{_KEY}/all"], timeout)
    except RuntimeError:
        if world.rank:
            return [report]  # rank 0 names the absent ranks
        absent = [rank for rank in range(world.size) if not store.check([f"{_KEY}/{rank}"])]
        raise LaunchError(
            f"preflight: {world.name_ranks(absent)} did not report within "
            f"{timeout.total_seconds():.0f} s (launch.meeting_seconds). Check their hosts; "
            "raise launch.meeting_seconds if the file system is slow"
        ) from None
    # all ranks return from `wait` together, so their clocks are read at nearly the same moment
    store.set(f"{_KEY}/clock/{report.rank}", repr(time.time()))
    return _collect(world.size, store) if world.rank == 0 else [report]


def _collect(size: int, store: "Store") -> list[RankReport]:
    texts = read_all(store, [f"{_KEY}/{rank}" for rank in range(size)])
    clocks = read_all(store, [f"{_KEY}/clock/{rank}" for rank in range(size)])
    return [
        replace(_read(text), clock_seconds=float(clock))
        for text, clock in zip(texts, clocks, strict=True)
    ]


def host_of(rank: int, store: "Store") -> str:
    """Return the host from which a rank reported."""
    try:
        return _read(store.get(f"{_KEY}/{rank}")).host
    except RuntimeError as error:
        raise RankZeroLostError(f"rank 0's store does not answer ({error})") from None


def free_bytes(path: Path) -> int:
    """Return the free bytes of a folder's file system. The folder need not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def used_bytes(folder: Path) -> int:
    """Return the bytes that the files below a folder take, without those that vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(parent) / name).lstat().st_blocks * _BLOCK_BYTES
    return total


def _read(text: bytes | str) -> RankReport:
    values = json.loads(text)
    return RankReport(**{**values, "interfaces": tuple(values["interfaces"])})
