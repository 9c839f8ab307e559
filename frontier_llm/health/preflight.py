"""Checks before the model is built that ranks are placed correctly and process groups work.

    check_all_ranks(...)   all ranks report to rank 0 through the store; rank 0 checks the reports
    check_groups(...)      each process group and each pair of stages exchanges numbers, with a
                           short time limit

The store is torch's key-value store, by which ranks find each other. Errors name the rank, host and
process group at fault. Each rank does a constant number of store operations, and one per second
if it waits longer than this for a group. No rank writes a file.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from frontier_llm.config.run import RunConfig
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.errors import LaunchError
from frontier_llm.health.rank_checks import RankReport, check_reports, exchange, host_of, name_some
from frontier_llm.launch.coordination import broadcast_from_rank_zero
from frontier_llm.launch.world import World
from frontier_llm.units import counted, format_seconds

_LOG = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0
"""Interval at which a rank that waits checks that its connection to the store has not been cut."""


def check_all_ranks(
    config: RunConfig,
    nodes_per_copy: int,
    world: World,
    store: dist.Store,
    accelerator: Accelerator,
    local: Path | None = None,
    old: Mapping[str, Sequence[Path]] | None = None,
) -> RankReport:
    """Report this rank to rank 0, which checks the reports of all ranks; return this rank's report.

    Collective over all ranks, through the store only. `nodes_per_copy` nodes together hold one copy
    of the optimizer states; `local` is the folder of this run's checkpoints on this node, and
    `old` has the folders by tier that are deleted when the run resumes. If some ranks are absent or
    a check failed, rank 0 raises a LaunchError, and the others a RankFailure without a message.
    """
    timeout = timedelta(seconds=config.launch.meeting_seconds)
    own_report = RankReport.of(config, world, accelerator, local, old)

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
    found = f"{counted(len(reports), 'rank')} on {counted(hosts, 'host')}"
    _LOG.debug("%-10s %s passed all checks", "preflight", found)
    variables = [f"{name}={value}" for name, value in reports[0].environment.items()]
    if variables:
        _LOG.debug("%-10s %s", "network", " ".join(variables))


MESSAGES = "stages "
"""Begin of the names of trials of two stages. Until their communicator exists, they wait for all
stages of their pipeline, which may be in the trials of other pairs."""


class Trial(NamedTuple):
    """The first use of a process group, or of the connection between two ranks."""

    name: str
    ranks: tuple[int, ...]
    run: Callable[[torch.device], tuple[float, float]]
    """Communicates; returns the number that was computed, and the right one."""
    pair: tuple[int, ...] = ()
    """The two of `ranks` that exchange messages; empty = all of them communicate."""


def collective_trial(
    name: str, group: dist.ProcessGroup, *, reduces: bool = True, exchanges: bool = False
) -> Trial:
    """Return a trial in which the ranks of a group add up or exchange one number per rank."""
    ranks = tuple(dist.get_process_group_ranks(group))

    def run(device: torch.device) -> tuple[float, float]:
        # the sums are exact, because the numbers are whole and fp64
        numbers = torch.zeros(len(ranks), dtype=torch.float64, device=device)
        numbers[group.rank()] = dist.get_rank() + 1.0
        times = 1
        if exchanges:
            dist.all_to_all_single(numbers, numbers.sum().repeat(len(ranks)), group=group)
            times = len(ranks) if reduces else 1
        if reduces:
            dist.all_reduce(numbers, group=group)
        return numbers.sum().item(), times * sum(rank + 1.0 for rank in ranks)

    return Trial(name, ranks, run)


def message_trial(name: str, ranks: tuple[int, int], group: dist.ProcessGroup) -> Trial:
    """Return a trial in which each of two ranks sends the other one a number, in one batch.

    The name has the two stages, such as `0 and 1`; the group contains both ranks.
    """
    own = dist.get_rank()
    other = sum(ranks) - own

    def run(device: torch.device) -> tuple[float, float]:
        sent = torch.tensor([own + 1.0], dtype=torch.float64, device=device)
        received = torch.zeros_like(sent)
        messages = [
            dist.P2POp(dist.isend, sent, other, group),
            dist.P2POp(dist.irecv, received, other, group),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        return received.item(), other + 1.0

    return Trial(f"{MESSAGES}{name}", tuple(dist.get_process_group_ranks(group)), run, ranks)


def check_groups(
    trials: Iterable[Trial],
    world: World,
    store: dist.Store,
    device: torch.device,
    timeout: timedelta,
) -> None:
    """Run the trials of this rank, one after the other, and check their results.

    Collective over all ranks, each of which passes the trials in which it takes part, in one order
    of all trials, after `check_all_ranks`. After it, no message of the run creates a communicator.
    The time limit holds per trial. Raises a LaunchError if a trial did not complete in time, or had
    a wrong result. The message names the group, and the ranks that did not join it with their
    hosts.
    """
    # NCCL waits in the store for the identifier of a communicator, and blocks its connection
    store = store.clone()  # type: ignore[attr-defined]
    for trial in trials:
        store.set(_progress_key(world.rank), trial.name)
        found, expected = _run_within(trial, world.rank, store, device, timeout)
        if found != expected:
            ranks = name_some(trial.pair or trial.ranks)
            raise LaunchError(
                f"preflight: the {trial.name} group (ranks {ranks}) computed "
                f"{found:g} instead of {expected:g}: the network between their hosts loses or "
                "corrupts messages. Check the network plugin and exclude these hosts"
            )


def _run_within(
    trial: Trial, rank: int, store: dist.Store, device: torch.device, timeout: timedelta
) -> tuple[float, float]:
    results: list[tuple[float, float] | Exception] = []

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # the current device belongs to the thread
            results.append(trial.run(device))
        except Exception as error:
            results.append(error)

    # In a thread, so that this function can stop waiting: NCCL's first collective in a group opens
    # connections, and the call returns only when all ranks of the group have made it.
    thread = threading.Thread(target=run, name=f"preflight {trial.name}", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout.total_seconds()
    while not results:
        left = deadline - time.monotonic()
        if left <= 0:
            raise LaunchError(_explain_incomplete(trial, store, timeout))
        thread.join(min(left, _LOOK_SECONDS))
        # fails if a rank has died and is replaced: nothing can end the thread's call
        store.check([_progress_key(rank)])
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def _explain_incomplete(trial: Trial, store: dist.Store, timeout: timedelta) -> str:
    name, ranks = trial.name, trial.ranks
    current = {
        rank: store.get(key).decode() if store.check([key]) else "before the first group"
        for rank in ranks
        for key in [_progress_key(rank)]
    }
    late = [rank for rank, at in current.items() if at != name]
    if trial.pair:  # other pairs may be ahead of, or behind, this one
        apart = [rank for rank in late if not current[rank].startswith(MESSAGES)]
        late = apart or [rank for rank in late if rank in trial.pair]
    absent = [f"rank {rank} on {host_of(rank, store)} (at: {current[rank]})" for rank in late]
    reason = (
        f"absent: {'; '.join(absent)}"
        if absent
        else (
            "all of them joined it, so the network between their hosts does not work, or this many "
            "ranks need more time (launch.preflight_seconds)"
        )
    )
    return (
        f"preflight: the {name} group of ranks {name_some(ranks)} did not exchange its first "
        f"messages within {format_seconds(timeout.total_seconds())} (launch.preflight_seconds); "
        f"{reason}"
    )


def _progress_key(rank: int) -> str:
    return f"preflight/at/{rank}"
