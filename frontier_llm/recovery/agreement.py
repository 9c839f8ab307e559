"""How the ranks of a new generation agree on where training continues, after a rank has died.

Every rank reports what it has in memory, rank 0 decides, and all ranks read the decision. These
facts make the decision simple:

- A rank knows the sums of a step (`StepSums`) only if every rank has given its addends, so that all
  gradients of the step are complete on every rank. A rank updates its states in the same moment in
  which it learns the sums, without communication in between.
- Ranks therefore differ by at most one update. Those that are behind repeat the update with the
  sums that the others know. No rank ever goes back.
- The optimizer states of a dead rank are in the memory of the ranks that hold the same interval:
  the other replicas, if the states are sharded over fewer ranks than there are replicas.

If no copy of a dead rank's states is left, all ranks load the newest checkpoint, in the same
processes.
"""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Literal

from frontier_llm.checkpoint.folders import committed
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.formats import StateFormats
from frontier_llm.geometry.partition import places_of_states
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.launch.coordination import read_all
from frontier_llm.membership.member import Place
from frontier_llm.saving.tiers import shared_folder
from frontier_llm.trainer.step_result import StepSums


@dataclass(frozen=True)
class Report:
    """What one rank has in memory."""

    has_states: bool
    """Whether it has the states of its rank, because it held this rank in the last generation."""
    sums: StepSums | None = None
    """The sums of the last step that it has updated with."""
    ended: int = 0
    """The last step that its loop has ended, with metrics and checkpoint. On a rank 0 without
    states, the last step in metrics.jsonl."""
    counters: Mapping[str, Any] | None = None
    """Progress, loss scale and blend, as in a checkpoint. They may be one step behind `sums`."""
    precision: str = ""
    """The compute precision; empty if it is not known to this process."""
    rank: int | None = None
    """The rank whose states it has; None without states."""
    unjudged: Mapping[str, Any] | None = None
    """Progress after the last step, before callbacks saw it and counted bad steps and rewinds."""

    def to_json(self) -> str:
        """Return the report as text, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Report":
        """Read the output of `to_json`."""
        values = json.loads(text)
        return cls(**{**values, "sums": _sums(values["sums"])})


@dataclass(frozen=True)
class Decision:
    """Where training continues."""

    source: Literal["memory", "checkpoint"]
    """`memory`: the ranks' states; `checkpoint`: the newest checkpoint, or the initial states."""
    reason: str = ""
    """Why the states in memory are not used."""
    sums: StepSums | None = None
    """The sums of the last update, in which all ranks will have taken part."""
    ended: int = 0
    """The last step that no rank has to end again."""
    counters: Mapping[str, Any] | None = None
    """Progress, loss scale and blend. They may be one step behind `sums`."""
    lenders: Mapping[int, int] | None = None
    """By rank without states: a rank that has the same states."""
    parts: Mapping[int, tuple[int, int]] | None = None
    """If ranks are missing: by remaining rank, which part of its states it saves, counted from 0,
    and the number of parts."""
    saves: bool = False
    """Whether a checkpoint was lost that was due, so that the states are saved now."""
    precision: str = ""
    """The compute precision of the run; empty if no rank knows it."""

    def to_json(self) -> str:
        """Return the decision as text, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Decision":
        """Read the output of `to_json`."""
        values = json.loads(text)
        for name, make in (("lenders", int), ("parts", tuple)):
            if values[name] is not None:
                values[name] = {int(rank): make(value) for rank, value in values[name].items()}
        return cls(**{**values, "sums": _sums(values["sums"])})


def decide(reports: Sequence[Report], places: Sequence[Hashable], obstacle: str = "") -> Decision:
    """Decide where training continues, given what each rank has.

    `places` has for each rank a value that is equal for ranks that hold the same optimizer states.
    An `obstacle` says why a copy in memory would not repeat the run exactly.
    """
    having = [rank for rank, report in enumerate(reports) if report.has_states]
    known = (reports[rank].sums for rank in having)
    sums = max((sums for sums in known if sums), key=lambda sums: sums.step, default=None)
    if sums is None:
        return Decision("checkpoint", "no step has been done since the last start")
    if obstacle:
        return Decision("checkpoint", obstacle)
    lenders, lacking = {}, []
    by_place = {places[rank]: rank for rank in reversed(having)}
    for rank, report in enumerate(reports):
        if report.has_states:
            continue
        if places[rank] in by_place:
            lenders[rank] = by_place[places[rank]]
        else:
            lacking.append(rank)
    if lacking:
        return Decision("checkpoint", f"no other rank has the states of rank {lacking[0]}")
    if not all(_can_reach(reports[rank], sums.step) for rank in having):
        return Decision("checkpoint", "ranks were loading a checkpoint")
    # counters of a rank that has not ended the last step do not count it yet
    oldest = min((reports[rank] for rank in having), key=lambda report: report.ended)
    recorded = [report.ended for rank, report in enumerate(reports) if _counts(rank, report)]
    # all ranks have ended the step before, because they have taken part in this one
    ended = max(min(*recorded, sums.step), sums.step - 1)
    counters, unjudged = oldest.counters, oldest.unjudged
    if ended < sums.step and counters and unjudged and unjudged["step"] == sums.step:
        counters = {**counters, "progress": unjudged}  # callbacks will see this step again
    return Decision("memory", "", sums, ended, counters, lenders)


def decide_for_run(
    config: RunConfig, size: int, ranks_per_node: int, reports: Sequence[Report]
) -> tuple[Decision, list[tuple[int, ...]]]:
    """Decide where a run on `size` ranks continues; also return `places_of_states`."""
    precision = next((report.precision for report in reports if report.precision), "")
    layout = ResolvedLayout.resolve(config, size, ranks_per_node, precision=precision or "fp32")
    places = places_of_states(layout.grid, layout.factors)
    decision = decide(reports, places, obstacle(config, layout))
    return replace(decision, precision=precision), places


def agree(
    config: RunConfig, place: Place, own: Report, decide_all: Callable[[list[Report]], Decision]
) -> Decision:
    """Tell rank 0 what this rank has, and return what rank 0 decides for all ranks.

    Collective over all ranks of a generation, through its store.
    """
    store, world = place.store, place.world
    timeout = timedelta(seconds=config.watchdog.startup_seconds)
    store.set(f"report/{world.rank}", own.to_json())
    if world.rank == 0:
        keys = [f"report/{other}" for other in range(world.size)]
        store.wait(keys, timeout)
        decision = decide_all([Report.from_json(text) for text in read_all(store, keys)])
        store.set("decision", decision.to_json())
        return decision
    store.wait(["decision"], timeout)
    return Decision.from_json(store.get("decision"))


def _counts(rank: int, report: Report) -> bool:
    return report.has_states or rank == 0


def _can_reach(report: Report, step: int) -> bool:
    """Return whether a rank has done the update of a step, or is one update behind."""
    assert report.counters is not None
    counted = int(report.counters["progress"]["step"])
    done = counted if report.sums is None else report.sums.step
    if report.sums is None and counted == step:
        return False  # it has begun to load another step
    return done in (step - 1, step) and counted in (step - 1, step)


def _sums(values: Mapping[str, Any] | None) -> StepSums | None:
    return None if values is None else StepSums(**{**values, "numbers": tuple(values["numbers"])})


def obstacle(config: RunConfig, layout: ResolvedLayout) -> str:
    """Return why states in memory would not repeat a run exactly; empty if they would."""
    if config.optimizer.name in ("muon", "adafactor"):
        return f"optimizer={config.optimizer.name} communicates during an update"
    if config.collectives.error_feedback:
        return "rounding errors of gradients (collectives.error_feedback) have no copy"
    formats = StateFormats.at(config.collectives, 1)
    has_refresh = layout.factors.optimizer > layout.factors.params
    if has_refresh and not formats.refresh.is_lossless(2):
        return "parameters are sent with rounding (collectives.refresh_format)"
    return ""


def is_overdue(config: RunConfig, step: int) -> bool:
    """Return whether the newest checkpoint that was due by a step is not in the run directory."""
    is_last = step == config.trainer.steps
    due = step if is_last else step - step % config.checkpoint.every_steps
    newest = max((step for step, _ in committed(shared_folder(config))), default=0)
    return config.checkpoint.mode != "off" and due > newest
