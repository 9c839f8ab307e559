"""The reports that all ranks send to rank 0 before the model is built, and their checks.

The checks cover placement on nodes, devices, configuration, network interfaces and disk space. Each
check is a function that yields one message per problem.
"""

import hashlib
import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store

from frontier_llm.config.partner_copies import KEPT
from frontier_llm.config.run import RunConfig
from frontier_llm.device import identity
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.errors import LaunchError
from frontier_llm.geometry.host_pool import STATE_BYTES
from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.launch.coordination import meet, read_all
from frontier_llm.launch.rendezvous import RankZeroLostError
from frontier_llm.launch.user_folders import find_stranger
from frontier_llm.launch.world import World
from frontier_llm.units import format_bytes, format_seconds

_KEY = "preflight/report"
"""Prefix of the keys in the store. `/N`: report of rank N. `/clock/N`: time on rank N. `/all`: set
when all ranks have reported. The prefix itself: number of ranks that have reported."""
_BLOCK_BYTES = 512
"""Unit in which the kernel counts the blocks of a file."""
_NAMED_HOSTS = 4
CLOCK_SKEW_SECONDS = 2.0
"""A larger difference between two hosts makes the order of two failures uncertain."""


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
    """Free bytes by tier, with those of what this run deletes there before it saves: copies in
    memory, and checkpoints beyond `checkpoint.keep`."""
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
        old: Mapping[str, Sequence[Path]] | None = None,
    ) -> "RankReport":
        """Describe this rank; `local`, its folder of checkpoints on this node, is made.

        `old` has the folders by tier that are deleted when the run resumes.
        """
        folders, stranger = {}, ""
        if world.rank == 0:
            folders["shared"] = Path(config.run.dir).absolute()
        if local is not None and world.rank % world.ranks_per_node == 0:
            folders["local"] = local
            stranger = find_stranger(local)
        old = dict(old or {})
        if local is not None and config.recovery.partner_copies:
            old["local"] = [local]
        free = {tier: free_bytes(folder) for tier, folder in folders.items()}
        free = {t: count + sum(map(used_bytes, old.get(t, ()))) for t, count in free.items()}
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
    report: RankReport, world: World, store: Store, timeout: timedelta
) -> list[RankReport]:
    """Send the report of every rank to rank 0; return all there, in order, and else only the own.

    Collective over all ranks, through the store. A rank makes four store operations, and rank 0
    makes two more. Raises LaunchError on rank 0 if some ranks did not report within the time limit;
    the message names these ranks and their hosts.
    """
    store.set(f"{_KEY}/{report.rank}", json.dumps(asdict(report)))
    try:
        meet(store, _KEY, world.size, timeout)
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


def _collect(size: int, store: Store) -> list[RankReport]:
    texts = read_all(store, [f"{_KEY}/{rank}" for rank in range(size)])
    clocks = read_all(store, [f"{_KEY}/clock/{rank}" for rank in range(size)])
    return [
        replace(_read(text), clock_seconds=float(clock))
        for text, clock in zip(texts, clocks, strict=True)
    ]


def host_of(rank: int, store: Store) -> str:
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


@dataclass(frozen=True)
class Findings:
    """The messages of failed checks."""

    errors: tuple[str, ...]
    warnings: tuple[str, ...]
    """Conditions that may be intended. They are only logged."""


def check_reports(
    config: RunConfig, nodes_per_copy: int, world: World, reports: Sequence[RankReport]
) -> Findings:
    """Check the reports of all ranks, which are in the order of the ranks.

    `nodes_per_copy` nodes together hold one copy of the optimizer states.
    """
    nodes_are_simulated = config.launch.ranks_per_node is not None or world.launcher == "local"
    errors = [*_devices(config, reports), *_agreement(reports), *_interfaces(reports)]
    warnings = [*_environment(config, reports), *_clocks(reports), *_device_kinds(config, reports)]
    if not nodes_are_simulated and world.generation:
        local, is_on = config.checkpoint.tiers.local.path, config.checkpoint.mode != "off"
        saves_locally = local is not None and is_on
        (errors if saves_locally else warnings).extend(_moves(world, reports, saves_locally))
    elif not nodes_are_simulated:
        errors += _placement(world, reports)
    space = [*_space(config, nodes_per_copy, reports), *_strangers(config, reports)]
    if world.launcher == "slurm":
        warnings += _cores(reports)
    return Findings((*errors, *space), tuple(warnings))


def _devices(config: RunConfig, reports: Sequence[RankReport]) -> Iterator[str]:
    """Check that no two ranks use the same device, which NCCL refuses."""
    if config.collectives.backend == "gloo":
        return
    ranks_by_device = defaultdict(list)
    for report in reports:
        if report.device:
            ranks_by_device[report.host, report.device].append(report.rank)
    for (host, device), ranks in ranks_by_device.items():
        if len(ranks) > 1:
            yield (
                f"ranks {name_some(ranks)} share one device ({device} on {host}): give each "
                "its own with srun --gpus-per-task=1, start fewer ranks per node, or test with "
                "collectives.backend=gloo, which is slow"
            )


def _placement(world: World, reports: Sequence[RankReport]) -> Iterator[str]:
    """Check that consecutive ranks share a node, and that each node is one host."""
    per_node = world.ranks_per_node
    node_of_host: dict[str, int] = {}
    for first in range(0, len(reports), per_node):
        hosts = {report.host for report in reports[first : first + per_node]}
        if len(hosts) > 1:
            yield (
                f"ranks {first} to {first + per_node - 1} should share a node, but are on "
                f"{', '.join(sorted(hosts))}: use srun --distribution=block"
            )
        for host in hosts:
            node = node_of_host.setdefault(host, first // per_node)
            if node != first // per_node:
                yield (
                    f"host {host} has the ranks of two nodes (from rank {node * per_node} and from "
                    f"rank {first}): use srun --ntasks-per-node={per_node}"
                )


def _moves(world: World, reports: Sequence[RankReport], saves_locally: bool) -> Iterator[str]:
    """Find ranks that a process on another node has taken over, away from the ranks of their node.

    Checkpoints on the disks of the nodes would lack the files of such a rank.
    """
    for first in range(0, len(reports), world.ranks_per_node):
        of_node = reports[first : first + world.ranks_per_node]
        hosts = sorted({report.host for report in of_node})
        if len(hosts) > 1:
            text = (
                f"ranks {first} to {of_node[-1].rank} have shared a node and are now on "
                f"{', '.join(hosts)}"
            )
            if saves_locally:
                text += (
                    ", so that checkpoints on the disks or in the memory of the nodes would be "
                    "incomplete (checkpoint.tiers.local.path, recovery.partner_copies): start the "
                    "run again, and let processes of another node take over only whole nodes"
                )
            yield text


def _agreement(reports: Sequence[RankReport]) -> Iterator[str]:
    first = reports[0]
    by_difference: dict[str, list[RankReport]] = defaultdict(list)
    for report in reports[1:]:
        if report.digest != first.digest:
            by_difference[
                f"another configuration than rank 0 (sha256 {report.digest[:12]} and "
                f"{first.digest[:12]}): check that all hosts run the same code"
            ].append(report)
        for name, version in report.versions.items():
            if version != first.versions.get(name):
                difference = f"{name} {version}, rank 0 has {first.versions.get(name)}"
                by_difference[difference].append(report)
    for difference, different in by_difference.items():
        hosts = sorted({report.host for report in different})
        more = f" and {len(hosts) - 4} more hosts" if len(hosts) > 4 else ""
        ranks = name_some([report.rank for report in different])
        subject, verb = ("rank", "has") if len(different) == 1 else ("ranks", "have")
        yield f"{subject} {ranks} on {', '.join(hosts[:4])}{more} {verb} {difference}"


def _interfaces(reports: Sequence[RankReport]) -> Iterator[str]:
    """Check that the host has every network interface that an environment variable names."""
    for report in reports:
        for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            names = report.environment.get(variable, "")
            if not names or names[0] in "^=":  # a pattern of NCCL instead of names
                continue
            # NCCL and gloo also accept the beginning of a name
            wanted, found = set(names.split(",")) - {"lo"}, report.interfaces
            missing = [name for name in wanted if not any(n.startswith(name) for n in found)]
            if missing:
                yield (
                    f"{variable}={names} on rank {report.rank}, but {report.host} has only "
                    f"{', '.join(report.interfaces) or 'the loopback'}: set it to one of these"
                )


def _space(config: RunConfig, nodes_per_copy: int, reports: Sequence[RankReport]) -> Iterator[str]:
    """Check that a checkpoint fits on the file system of each tier, and all copies in memory."""
    if config.checkpoint.mode == "off":
        return
    total = STATE_BYTES * count_parameters(config.model, config.data.sequence_length)
    for report in reports:
        for tier, free in report.free_bytes.items():
            copies = 2 if config.checkpoint.partner else 1  # one of them of another node
            what = "a checkpoint takes"
            key = "run.dir" if tier == "shared" else "checkpoint.tiers.local.path"
            keep, kept = "checkpoint.keep", config.checkpoint.keep
            if tier == "local":
                keep, kept = "checkpoint.tiers.local.keep", config.checkpoint.tiers.local.keep
            lower = f"lower {keep} if older checkpoints take it, " if kept > 1 else ""
            todo = f"free some space, {lower}or set {key} to another file system"
            if tier == "local" and config.recovery.partner_copies:
                copies, what = copies * (KEPT + 1), "the copies in memory take up to"
                todo = "use more nodes, or set recovery.partner_copies=false"
            needed = total if tier == "shared" else copies * total // nodes_per_copy
            if free < needed:
                yield (
                    f"{report.folders[tier]} on {report.host} has {format_bytes(free)} free, "
                    f"{what} {format_bytes(needed)}: {todo}"
                )


def _strangers(config: RunConfig, reports: Sequence[RankReport]) -> Iterator[str]:
    copies = config.recovery.partner_copies
    key = "recovery.copies_path" if copies else "checkpoint.tiers.local.path"
    for report in reports:
        if report.stranger:
            yield (
                f"{report.stranger} on {report.host}, so that another user may read this run's "
                f"states or exchange them: remove it, or set {key} to a folder of your own"
            )


def _environment(config: RunConfig, reports: Sequence[RankReport]) -> Iterator[str]:
    on_one_node = len({report.host for report in reports}) == 1
    for name, wanted in config.cluster.environment.items():
        if name == "NCCL_NET" and on_one_node:  # a node without neighbours does not use a network
            continue
        ranks_by_value = defaultdict(list)
        for report in reports:
            value = report.environment.get(name)
            if value != wanted:
                ranks_by_value[value].append(report.rank)
        for value, ranks in ranks_by_value.items():
            yield (
                f"{name} is {'not set' if value is None else value} on ranks {name_some(ranks)}; "
                f"conf/cluster/{config.cluster.name}.yaml wants {wanted}"
            )


def _clocks(reports: Sequence[RankReport]) -> Iterator[str]:
    """Compare the clock of each host, which the first of its ranks has read, with the median."""
    clocks = {report.host: report.clock_seconds for report in reversed(reports)}
    median = sorted(clocks.values())[(len(clocks) - 1) // 2]
    skews = {host: clock - median for host, clock in clocks.items()}
    wrong = sorted(skews, key=lambda host: -abs(skews[host]))
    wrong = [host for host in wrong if abs(skews[host]) > CLOCK_SKEW_SECONDS]
    for host in wrong[:_NAMED_HOSTS]:
        direction = "ahead" if skews[host] > 0 else "behind"
        yield (
            f"the clock of {host} is {format_seconds(abs(skews[host]))} {direction}: timestamps in "
            "logs will not match"
        )
    if len(wrong) > _NAMED_HOSTS:
        yield f"the clocks of {len(wrong) - _NAMED_HOSTS} more hosts are wrong by less"


def _device_kinds(config: RunConfig, reports: Sequence[RankReport]) -> Iterator[str]:
    wanted = config.cluster.device.kind
    wrong = [report for report in reports if report.kind != wanted]
    if wrong:
        yield (
            f"cluster={config.cluster.name} has {wanted} devices, but ranks "
            f"{name_some([report.rank for report in wrong])} compute on {wrong[0].device_name}"
        )


def _cores(reports: Sequence[RankReport]) -> Iterator[str]:
    ranks_by_cores = defaultdict(list)
    for report in reports:
        ranks_by_cores[report.host, report.cores].append(report.rank)
    shared = {place: ranks for place, ranks in ranks_by_cores.items() if len(ranks) > 1}
    if shared:
        (host, cores), ranks = next(iter(shared.items()))
        yield (
            f"ranks {name_some(ranks)} share the cores {cores} of {host}"
            + (f", and likewise in {len(shared) - 1} more places" if len(shared) > 1 else "")
            + ": srun --cpus-per-task=N gives each rank its own cores"
        )


def name_some(ranks: Sequence[int]) -> str:
    """List ranks in a message; of more than 8 ranks, list the first four and the last."""
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:4]))} ... {ranks[-1]} ({len(ranks)} ranks)"
