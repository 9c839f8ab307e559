"""Before anything is built: is every rank where it should be, and does every group work?

    roll_call(...)     through the store: all reports reach rank 0, who judges for all
    use_groups(...)    each group adds up its ranks' numbers, once, under a short time-out

Both name the rank, its host and the group that is at fault. The store serves a number of operations
that grows with the number of ranks and no faster; no rank writes a file.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from frontier_llm.config.run import RunConfig
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.errors import LaunchError
from frontier_llm.parallel.agreement import made_once
from frontier_llm.parallel.findings import examine, name_some
from frontier_llm.parallel.rank_report import RankReport, exchange, host_of
from frontier_llm.parallel.world import World
from frontier_llm.units import format_seconds

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.001


def roll_call(
    config: RunConfig, world: World, store: "Store", accelerator: Accelerator
) -> RankReport:
    """Report this rank, and have rank 0 judge all reports.

    Collective over all ranks, through the store alone.

    Returns:
        This rank's report.

    Raises:
        LaunchError: on rank 0: ranks are absent, or something that would spoil the run; on the
            others a RankFailure without a message.
    """
    timeout = timedelta(seconds=config.launch.meeting_seconds)
    mine = RankReport.of(config, world, accelerator)

    def verdict() -> str:
        reports = exchange(mine, world, store, timeout)
        found = examine(config, world, reports)
        for warning in found.warnings:
            _LOG.warning("preflight: %s", warning)
        if found.errors:
            raise LaunchError("\n".join(f"preflight: {error}" for error in found.errors))
        _announce(reports)
        return "passed"

    if world.rank:
        exchange(mine, world, store, timeout)
    # rank 0 may need `timeout` to find somebody absent; the others wait for what it says of that
    made_once(world, store, "preflight", verdict, 2 * timeout)
    return mine


def _announce(reports: Sequence[RankReport]) -> None:
    hosts = len({report.host for report in reports})
    _LOG.info("%-10s %d ranks on %d hosts, as they should be", "preflight", len(reports), hosts)
    variables = [f"{name}={value}" for name, value in reports[0].environment.items()]
    if variables:
        _LOG.info("%-10s %s", "network", " ".join(variables))


def use_groups(
    groups: Mapping[str, "ProcessGroup | None"],
    world: World,
    store: "Store",
    device: "torch.device",
    timeout: timedelta,
) -> None:
    """Add up a number over each of this rank's groups.

    Collective over all ranks, which call it with the same names in the same order.

    Args:
        groups: by name; None where this rank has none.
        world: this rank's place.
        store: where the ranks met and reported.
        device: on which the groups work.
        timeout: how long a group may take.

    Raises:
        LaunchError: a group did not come together in time, or added up wrongly; names it, and
            those of its ranks that did not come, with their hosts.
    """
    for name, group in groups.items():
        if group is not None:
            store.set(_at(world.rank), name)
            _use(name, group, world, store, device, timeout)


def _use(
    name: str,
    group: "ProcessGroup",
    world: World,
    store: "Store",
    device: "torch.device",
    timeout: timedelta,
) -> None:
    import torch
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    total = torch.tensor([world.rank + 1.0], dtype=torch.float64, device=device)  # exact sums
    begun: list[dist.Work | Exception] = []

    def begin() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # of this thread
            begun.append(dist.all_reduce(total, group=group, async_op=True))
        except Exception as error:
            begun.append(error)

    # NCCL connects within the first call, which returns when all ranks have come
    threading.Thread(target=begin, name=f"preflight {name}", daemon=True).start()
    deadline = time.monotonic() + timeout.total_seconds()
    while not begun or (isinstance(begun[0], dist.Work) and not begun[0].is_completed()):
        if time.monotonic() > deadline:
            raise LaunchError(_incomplete(name, ranks, store, timeout))
        time.sleep(_POLL_SECONDS)
    if isinstance(begun[0], Exception):
        raise begun[0]
    begun[0].wait()
    expected = sum(rank + 1.0 for rank in ranks)
    if total.item() != expected:
        raise LaunchError(
            f"preflight: the {name} group of ranks {name_some(ranks)} added up to {total.item():g} "
            f"instead of {expected:g}: its network loses or mixes messages"
        )


def _incomplete(name: str, ranks: Sequence[int], store: "Store", timeout: timedelta) -> str:
    """Name those that were not yet at this group; they stand at an earlier one, or nowhere."""
    absent = []
    for rank in ranks:
        at = store.get(_at(rank)).decode() if store.check([_at(rank)]) else "no group yet"
        if at != name:
            absent.append(f"rank {rank} on {host_of(rank, store)} (at: {at})")
    who = "; ".join(absent) or (
        "nobody, all of them came: the network between their hosts does not work, or so many ranks "
        "need longer (launch.preflight_seconds)"
    )
    return (
        f"preflight: the {name} group of ranks {name_some(ranks)} did not come together within "
        f"{format_seconds(timeout.total_seconds())} (launch.preflight_seconds); absent: {who}"
    )


def _at(rank: int) -> str:
    return f"preflight/at/{rank}"
