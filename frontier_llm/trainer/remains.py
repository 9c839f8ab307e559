"""Saves what the remaining ranks of a run have in memory, if no process is left for another rank.

The states are complete if each one is in the memory of a remaining rank. They are then saved as a
checkpoint of the last step in the run directory, from which the run continues on fewer ranks, or
resumes in another job.
"""

import json
import logging
from collections import defaultdict
from dataclasses import replace
from datetime import timedelta
from typing import Any

from frontier_llm.checkpoint.discovery import committed
from frontier_llm.checkpoint.manager import CheckpointManager
from frontier_llm.checkpoint.manager_options import Options
from frontier_llm.checkpoint.write_plan import part_of
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.launch.membership import Place
from frontier_llm.protocols import StateShard
from frontier_llm.trainer.agreement import Decision, Report, agree, decide
from frontier_llm.trainer.checkpoint_places import shared_folder
from frontier_llm.trainer.replicas import fitted_to, obstacle, places_of_states
from frontier_llm.trainer.survivor import Survivor, counters_after

_LOG = logging.getLogger(__name__)


def save_remains(config: RunConfig, place: Place, kept: Survivor | None) -> None:
    """Save the states after the last step, if the remaining ranks have all of them.

    Collective over the remaining ranks, through the store. `kept` is None if this process has no
    states. Raises a CheckpointError if the checkpoint cannot be written.
    """
    size, world = place.former_size, place.world
    former = fitted_to(config, size)
    own = Report(False)
    if kept is not None and kept.ranks == size:
        own = kept.report()
        place.store.set("meta", json.dumps(kept.meta))  # rank 0 may be new, and writes the manifest
    timeout = timedelta(seconds=config.watchdog.startup_seconds)

    def decide_all(reports: list[Report]) -> Decision:
        return _decide(former, size, world.ranks_per_node, reports)

    decision = agree(place.store, world.rank, world.size, own, decide_all, timeout)
    if decision.source == "checkpoint":
        if world.rank == 0:
            _LOG.warning("the remaining ranks cannot save the last step: %s", decision.reason)
        return
    assert decision.sums is not None
    shards: list[StateShard] = []
    part = (decision.parts or {}).get(kept.rank) if kept else None
    if kept is not None and part is not None:
        kept.catch_up(decision)
        shards = list(part_of(kept.shards, *part))
    meta = json.loads(place.store.get("meta")) | counters_after(decision, former)
    settings = config.checkpoint
    manager = CheckpointManager(
        shared_folder(config),
        world.rank,
        world.size,
        place.store,
        "blocking",
        settings.keep,
        timedelta(seconds=settings.timeout_seconds),
        Options(keep_every_steps=settings.keep_every_steps),
    )
    manager.prepare(shards)
    manager.begin(decision.sums.step, shards, meta)
    if world.rank == 0:
        _LOG.warning("the remaining ranks have saved step %d", decision.sums.step)


def _decide(config: RunConfig, size: int, per_node: int, found: list[Report]) -> Decision:
    """Decide what the remaining ranks save, given what each of them has."""
    if config.checkpoint.mode == "off":
        return Decision("checkpoint", "checkpoint.mode=off")
    reports = [Report(False)] * size
    for report in found:
        if report.rank is not None:
            reports[report.rank] = report
    precision = next((report.precision for report in found if report.precision), "fp32")
    layout = ResolvedLayout.resolve(config, size, per_node, precision=precision)
    places = places_of_states(layout.grid, layout.factors)
    decision = decide(reports, places, obstacle(config, layout))
    if decision.sums is not None and decision.sums.step in dict(committed(shared_folder(config))):
        return Decision("checkpoint", f"step {decision.sums.step} is saved already")
    ranks_of: dict[Any, list[int]] = defaultdict(list)
    for rank, report in enumerate(reports):
        if report.has_states:
            ranks_of[places[rank]].append(rank)
    parts = {
        rank: (number, len(ranks))
        for ranks in ranks_of.values()
        for number, rank in enumerate(ranks)
    }
    return replace(decision, precision=precision, parts=parts)
