"""What a rank says of itself at start-up, and how all reports reach rank 0: through the store."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm.config.run import RunConfig
from frontier_llm.device import identity
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.errors import LaunchError
from frontier_llm.parallel.world import RankZeroLostError, World

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_KEY = "preflight/report"


@dataclass(frozen=True)
class RankReport:
    """One rank: where it runs, with what, and what it was told."""

    rank: int
    host: str
    device: str
    """What tells its device from all others of the host; empty on a CPU."""
    device_name: str
    """As the driver says it."""
    kind: str
    """`cpu`, `cuda` or `hip`."""
    interfaces: tuple[str, ...]
    """Network interfaces of the host that are up."""
    cores: str
    """On which it may run, as ranges."""
    digest: str
    """Of the configuration it was given."""
    versions: dict[str, str]
    """Of Python and libraries."""
    environment: dict[str, str]
    """Variables that decide how ranks talk."""
    free_bytes: dict[str, int]
    """Of each folder that is written to; a node's folders are reported by its first rank."""
    clock_seconds: float = 0.0
    """Of its host, read when all ranks were there: about the same moment everywhere."""

    @classmethod
    def of(cls, config: RunConfig, world: World, accelerator: Accelerator) -> "RankReport":
        """Describe this rank."""
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
            free_bytes={str(path): free_bytes(path) for path in _folders(config, world)},
        )


def exchange(
    report: RankReport, world: World, store: "Store", timeout: timedelta
) -> list[RankReport]:
    """Hand every rank's report to rank 0.

    Collective over all ranks, through the store: four operations a rank, two more on rank 0.

    Args:
        report: of this rank.
        world: its place.
        store: where the ranks met.
        timeout: how long rank 0 waits for the others.

    Returns:
        All reports in the order of the ranks on rank 0, this rank's own elsewhere.

    Raises:
        LaunchError: on rank 0: some ranks did not report; names them and their hosts.
    """
    store.set(f"{_KEY}/{report.rank}", json.dumps(asdict(report)))
    if store.add(_KEY, 1) == world.size:
        store.set(f"{_KEY}/all", "")
    try:
        store.wait([f"{_KEY}/all"], timeout)
    except RuntimeError:
        if world.rank:
            return [report]  # rank 0 will say who is absent
        absent = [rank for rank in range(world.size) if not store.check([f"{_KEY}/{rank}"])]
        raise LaunchError(
            f"preflight: {world.name_ranks(absent)} did not report within "
            f"{timeout.total_seconds():.0f} s (launch.meeting_seconds): look at their hosts"
        ) from None
    store.set(f"{_KEY}/clock/{report.rank}", repr(time.time()))  # all ranks wake up together
    return _collect(world.size, store) if world.rank == 0 else [report]


def _collect(size: int, store: "Store") -> list[RankReport]:
    texts = store.multi_get([f"{_KEY}/{rank}" for rank in range(size)])
    clocks = store.multi_get([f"{_KEY}/clock/{rank}" for rank in range(size)])
    return [
        replace(_read(text), clock_seconds=float(clock))
        for text, clock in zip(texts, clocks, strict=True)
    ]


def host_of(rank: int, store: "Store") -> str:
    """Return the host from which a rank reported.

    Raises:
        RankZeroLostError: the store does not answer.
    """
    try:
        return _read(store.get(f"{_KEY}/{rank}")).host
    except RuntimeError as error:
        raise RankZeroLostError(f"rank 0's store does not answer ({error})") from None


def free_bytes(path: Path) -> int:
    """Return the free space of the file system on which a folder lies or will lie."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def tiers(config: RunConfig) -> Mapping[str, Path]:
    """Return the folders that a run writes to: `shared`, and `local` if there is that tier."""
    folders = {"shared": Path(config.run.dir).absolute()}
    local = config.checkpoint.tiers.local.path
    if local is not None:
        folders["local"] = Path(os.path.expandvars(local)).absolute()
    return folders


def _folders(config: RunConfig, world: World) -> list[Path]:
    folders = tiers(config)
    mine = [folders["shared"]] if world.rank == 0 else []
    if "local" in folders and world.rank % world.ranks_per_node == 0:
        mine.append(folders["local"])
    return mine


def _read(text: bytes | str) -> RankReport:
    values = json.loads(text)
    return RankReport(**{**values, "interfaces": tuple(values["interfaces"])})
