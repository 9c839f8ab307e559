"""What is wrong with the ranks of a job, from what each says of itself."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.geometry.layout import make_grid, resolve_factors
from frontier_llm.geometry.partition import data_ranks_per_node
from frontier_llm.parallel.rank_report import RankReport, tiers
from frontier_llm.parallel.world import World
from frontier_llm.units import format_bytes, format_seconds

STATE_BYTES = 12
"""Of a parameter in a checkpoint: fp32 master and two moments."""
CLOCK_SKEW_SECONDS = 2.0
"""Between two hosts; more than this confuses which of two failures came first."""


@dataclass(frozen=True)
class Findings:
    """What is wrong, and what may be."""

    errors: tuple[str, ...]
    warnings: tuple[str, ...]


def examine(config: RunConfig, world: World, reports: Sequence[RankReport]) -> Findings:
    """Judge all ranks' reports.

    Args:
        config: of the run.
        world: of rank 0.
        reports: of all ranks, in their order.
    """
    pretended = config.launch.ranks_per_node is not None or world.launcher == "local"
    errors = [*_devices(reports), *_agreement(reports), *_interfaces(reports)]
    if not pretended:
        errors += _placement(world, reports)
    space = list(_space(config, world, reports))
    warnings = [*_environment(config, reports), *_clocks(reports), *_kinds(config, reports)]
    if world.launcher == "slurm":
        warnings += _cores(reports)
    return Findings((*errors, *space), tuple(warnings))


def _devices(reports: Sequence[RankReport]) -> Iterator[str]:
    holders = defaultdict(list)
    for report in reports:
        if report.device:
            holders[report.host, report.device].append(report.rank)
    for (host, device), ranks in holders.items():
        if len(ranks) > 1:
            yield (
                f"ranks {name_some(ranks)} share one device ({device} on {host}): give each "
                "its own with srun --gpus-per-task=1, or start fewer ranks a node"
            )


def _placement(world: World, reports: Sequence[RankReport]) -> Iterator[str]:
    """Hold the hosts against the rule that neighbouring ranks share a node."""
    per_node = world.ranks_per_node
    seen: dict[str, int] = {}
    for first in range(0, len(reports), per_node):
        hosts = {report.host for report in reports[first : first + per_node]}
        if len(hosts) > 1:
            yield (
                f"ranks {first} to {first + per_node - 1} should share a node, but are on "
                f"{', '.join(sorted(hosts))}: use srun --distribution=block"
            )
        for host in hosts:
            node = seen.setdefault(host, first // per_node)
            if node != first // per_node:
                yield (
                    f"host {host} holds the ranks of two nodes, those from {node * per_node} and "
                    f"those from {first} on: use srun --ntasks-per-node={per_node}"
                )


def _agreement(reports: Sequence[RankReport]) -> Iterator[str]:
    """Hold what all ranks must have in common against rank 0's."""
    first = reports[0]
    others: dict[str, list[RankReport]] = defaultdict(list)
    for report in reports[1:]:
        if report.digest != first.digest:
            others[
                f"another configuration than rank 0 (sha256 {report.digest[:12]} and "
                f"{first.digest[:12]}): is the checkout of the code another one?"
            ].append(report)
        for name, version in report.versions.items():
            if version != first.versions.get(name):
                others[f"{name} {version}, rank 0 has {first.versions.get(name)}"].append(report)
    for what, those in others.items():
        hosts = sorted({report.host for report in those})
        more = f" and {len(hosts) - 4} more hosts" if len(hosts) > 4 else ""
        ranks = name_some([report.rank for report in those])
        subject, verb = ("rank", "has") if len(those) == 1 else ("ranks", "have")
        yield f"{subject} {ranks} on {', '.join(hosts[:4])}{more} {verb} {what}"


def _interfaces(reports: Sequence[RankReport]) -> Iterator[str]:
    """Refuse an interface that a variable names and the host does not have."""
    for report in reports:
        for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            wanted = report.environment.get(variable, "")
            if not wanted or wanted[0] in "^=":  # NCCL's patterns
                continue
            missing = [name for name in wanted.split(",") if not _has(report, name)]
            if missing:
                yield (
                    f"{variable}={wanted} on rank {report.rank}, but {report.host} has only "
                    f"{', '.join(report.interfaces) or 'the loopback'}: set it to one of those"
                )


def _has(report: RankReport, interface: str) -> bool:
    return interface == "lo" or any(name.startswith(interface) for name in report.interfaces)


def _space(config: RunConfig, world: World, reports: Sequence[RankReport]) -> Iterator[str]:
    """Refuse a tier on which not even one checkpoint fits."""
    if config.checkpoint.mode == "off":
        return
    whole = STATE_BYTES * count_parameters(config.model, config.data.sequence_length)
    for tier, folder in tiers(config).items():
        needed = whole if tier == "shared" else whole // _nodes_of_a_copy(config, world)
        for report in reports:
            free = report.free_bytes.get(str(folder))
            if free is not None and free < needed:
                yield (
                    f"{folder} on {report.host} has {format_bytes(free)} free, a checkpoint takes "
                    f"{format_bytes(needed)}: make room, or set another folder"
                )


def _nodes_of_a_copy(config: RunConfig, world: World) -> int:
    """Return over how many nodes one copy of the optimizer states is spread."""
    grid = make_grid(config, world.size, world.ranks_per_node)
    cut = resolve_factors(config, grid).optimizer
    ranks = grid.tensor * grid.pipeline * max(cut, data_ranks_per_node(grid) or 1)
    return max(1, ranks // world.ranks_per_node)


def _environment(config: RunConfig, reports: Sequence[RankReport]) -> Iterator[str]:
    for name, wanted in config.cluster.environment.items():
        others = defaultdict(list)
        for report in reports:
            got = report.environment.get(name)
            if got != wanted:
                others[got].append(report.rank)
        for got, ranks in others.items():
            yield (
                f"{name} is {'not set' if got is None else got} on ranks {name_some(ranks)}; "
                f"conf/cluster/{config.cluster.name}.yaml wants {wanted}"
            )


def _clocks(reports: Sequence[RankReport]) -> Iterator[str]:
    clocks = sorted(report.clock_seconds for report in reports)
    middle = clocks[len(clocks) // 2]
    for report in reports:
        skew = report.clock_seconds - middle
        if abs(skew) > CLOCK_SKEW_SECONDS:
            yield (
                f"the clock of {report.host} (rank {report.rank}) is {format_seconds(abs(skew))} "
                f"{'ahead' if skew > 0 else 'behind'}: times in logs will not fit together"
            )


def _kinds(config: RunConfig, reports: Sequence[RankReport]) -> Iterator[str]:
    wanted = config.cluster.device.kind
    wrong = [report for report in reports if report.kind != wanted]
    if wrong:
        yield (
            f"cluster={config.cluster.name} has {wanted} devices, but ranks "
            f"{name_some([report.rank for report in wrong])} compute on {wrong[0].device_name}"
        )


def _cores(reports: Sequence[RankReport]) -> Iterator[str]:
    """Find ranks of a host whose cores are not their own."""
    holders = defaultdict(list)
    for report in reports:
        holders[report.host, report.cores].append(report.rank)
    shared = {at: ranks for at, ranks in holders.items() if len(ranks) > 1}
    if shared:
        (host, cores), ranks = next(iter(shared.items()))
        yield (
            f"ranks {name_some(ranks)} share the cores {cores} of {host}"
            + (f", and so on {len(shared) - 1} more hosts" if len(shared) > 1 else "")
            + ": with srun --cpus-per-task=N each would have its own"
        )


def name_some(ranks: Sequence[int]) -> str:
    """Name ranks; of many, the first and the last."""
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:4]))} ... {ranks[-1]} ({len(ranks)} ranks)"
