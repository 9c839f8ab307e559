"""Checks before the model is built that ranks are placed correctly and process groups work.

    check_all_ranks(...)   all ranks report to rank 0 through the store; rank 0 checks the reports
    check_groups(...)      each process group adds up one number per rank, with a short time limit

The store is torch's key-value store, by which ranks find each other. Errors name the rank, host and
process group at fault. Each rank does a constant number of store operations, and one per second
if it waits longer than this for a group. No rank writes a file.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm.config.run import RunConfig
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.errors import LaunchError
from frontier_llm.health.rank_checks import check_reports, name_some
from frontier_llm.health.rank_report import RankReport, exchange, host_of
from frontier_llm.launch.coordination import broadcast_from_rank_zero
from frontier_llm.launch.world import World
from frontier_llm.units import format_seconds

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.001
"""Interval at which a rank checks whether a collective has completed."""
_LOOK_SECONDS = 1.0
"""Interval at which a rank that waits checks that its connection to the store has not been cut."""


def check_all_ranks(
    config: RunConfig,
    nodes_per_copy: int,
    world: World,
    store: "Store",
    accelerator: Accelerator,
    copies: Path | None = None,
) -> RankReport:
    """Report this rank to rank 0, which checks the reports of all ranks.

    Collective over all ranks, through the store only.

    Args:
        config: configuration of the run.
        nodes_per_copy: number of nodes that together hold one copy of the optimizer states.
        world: rank of this process, number of ranks, and host.
        store: the store of all ranks.
        accelerator: the device of this rank.
        copies: folder of this run's copies in memory on this node; None without.

    Returns:
        This rank's report.

    Raises:
        LaunchError: some ranks are absent, or a check failed. Raised on rank 0.
        RankFailure: rank 0 has raised a LaunchError. Raised on the other ranks, without a message.
    """
    timeout = timedelta(seconds=config.launch.meeting_seconds)
    own_report = RankReport.of(config, world, accelerator, copies)

    def check() -> str:
        reports = exchange(own_report, world, store, timeout)
        findings = check_reports(config, nodes_per_copy, world, reports)
        for warning in findings.warnings:
            _LOG.warning("preflight: %s", warning)
        if findings.errors:
            raise LaunchError("\n".join(f"preflight: {error}" for error in findings.errors))
        _log_success(reports)
        return "passed"

    if world.rank:
        exchange(own_report, world, store, timeout)
    # the other ranks wait twice as long, since rank 0 may need `timeout` to notice an absent rank
    broadcast_from_rank_zero(world, store, "preflight", check, 2 * timeout)
    return own_report


def _log_success(reports: Sequence[RankReport]) -> None:
    hosts = len({report.host for report in reports})
    _LOG.info("%-10s %d ranks on %d hosts passed all checks", "preflight", len(reports), hosts)
    variables = [f"{name}={value}" for name, value in reports[0].environment.items()]
    if variables:
        _LOG.info("%-10s %s", "network", " ".join(variables))


def check_groups(
    groups: Mapping[str, "ProcessGroup | None"],
    world: World,
    store: "Store",
    device: "torch.device",
    timeout: timedelta,
) -> None:
    """Run one all-reduce on each process group of this rank and check its result.

    Collective over all ranks, which must pass the same names in the same order.

    Args:
        groups: groups by name; None where this rank is in no such group. Groups of one rank are
            skipped.
        world: rank of this process, number of ranks, and host.
        store: the store in which the ranks have reported (`check_all_ranks`).
        device: the device on which the groups communicate.
        timeout: time limit per group.

    Raises:
        LaunchError: a group did not complete in time, or computed a wrong sum. The message names
            the group, and the ranks that did not join it with their hosts.
    """
    # NCCL waits in the store for the identifier of a communicator, and blocks its connection
    store = store.clone()  # type: ignore[attr-defined]
    for name, group in groups.items():
        if group is not None and group.size() > 1:
            store.set(_progress_key(world.rank), name)
            _check_group(name, group, world, store, device, timeout)


def _check_group(
    name: str,
    group: "ProcessGroup",
    world: World,
    store: "Store",
    device: "torch.device",
    timeout: timedelta,
) -> None:
    """Run and check the all-reduce of one group; the arguments are those of `check_groups`."""
    import torch
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    # the sums are exact, because the numbers are whole and fp64
    total = torch.tensor([world.rank + 1.0], dtype=torch.float64, device=device)
    started: list[dist.Work | Exception] = []  # receives the running collective, or an error

    def start() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # the current device belongs to the thread
            started.append(dist.all_reduce(total, group=group, async_op=True))
        except Exception as error:
            started.append(error)

    # In a thread, so that this function can stop waiting: NCCL's first collective in a group opens
    # connections, and the call returns only when all ranks of the group have made it.
    threading.Thread(target=start, name=f"preflight {name}", daemon=True).start()
    deadline = time.monotonic() + timeout.total_seconds()
    next_look = time.monotonic() + _LOOK_SECONDS
    while not started or (isinstance(started[0], dist.Work) and not started[0].is_completed()):
        if time.monotonic() > deadline:
            raise LaunchError(_explain_incomplete(name, ranks, store, timeout))
        if time.monotonic() > next_look:
            # fails if a rank has died and is replaced: nothing can end the thread's call
            store.check([_progress_key(world.rank)])
            next_look = time.monotonic() + _LOOK_SECONDS
        time.sleep(_POLL_SECONDS)
    if isinstance(started[0], Exception):
        raise started[0]
    started[0].wait()
    expected = sum(rank + 1.0 for rank in ranks)
    if total.item() != expected:
        raise LaunchError(
            f"preflight: an all-reduce of the {name} group (ranks {name_some(ranks)}) gave "
            f"{total.item():g} instead of {expected:g}: the network between their hosts loses or "
            "corrupts messages. Check the network plugin and exclude these hosts"
        )


def _explain_incomplete(name: str, ranks: Sequence[int], store: "Store", timeout: timedelta) -> str:
    """Return an error message that names the ranks that have not joined the group."""
    absent = []
    for rank in ranks:
        key = _progress_key(rank)
        current_group = store.get(key).decode() if store.check([key]) else "before the first group"
        if current_group != name:
            absent.append(f"rank {rank} on {host_of(rank, store)} (at: {current_group})")
    reason = (
        f"absent: {'; '.join(absent)}"
        if absent
        else (
            "all of them joined it, so the network between their hosts does not work, or this many "
            "ranks need more time (launch.preflight_seconds)"
        )
    )
    return (
        f"preflight: the {name} group of ranks {name_some(ranks)} did not complete an all-reduce "
        f"within {format_seconds(timeout.total_seconds())} (launch.preflight_seconds); {reason}"
    )


def _progress_key(rank: int) -> str:
    """Return the key under which a rank stores the name of the group that it is checking."""
    return f"preflight/at/{rank}"
