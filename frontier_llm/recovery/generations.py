"""Does the work of a rank, once or again in each generation of a job.

A generation begins when processes that died are replaced (membership/roster_store.py); a job that
replaces none has a single one. A member waits for a rank, agrees with the other ranks where
training continues (agreement.py), builds groups and model (assemble.py), takes the states over from
memory, and trains until the job is done or another member dies. What it keeps between generations
is a `Survivor`.
"""

import gc
import logging
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import torch

from frontier_llm.checkpoint.archive import Archive
from frontier_llm.config.run import RunConfig
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.errors import CheckpointError, StopRequested
from frontier_llm.geometry.elastic import fitted_to
from frontier_llm.health.watchdog import Watchdog
from frontier_llm.membership.member import Membership, Place
from frontier_llm.parallel.groups import abort_groups, destroy_groups, forget_groups
from frontier_llm.recovery.agreement import Decision, Report, agree, decide_for_run, is_overdue
from frontier_llm.recovery.survivor import Survivor, lend, restore_counters, save_remains
from frontier_llm.saving.adaptation import missed_updates
from frontier_llm.saving.run_directory import FAILURES, prepare_restart, recorded_steps
from frontier_llm.saving.tiers import shared_folder
from frontier_llm.telemetry.log import setup_logging
from frontier_llm.trainer.assemble import build_context, prepare_device, run_log
from frontier_llm.trainer.callbacks.callback_list import make_callbacks
from frontier_llm.trainer.context import Continuation, TrainerContext
from frontier_llm.trainer.loop import Loop

_LOG = logging.getLogger(__name__)


def run_member(config: RunConfig, corpora: Sequence[Path], membership: Membership) -> None:
    """Hold ranks of the run until the job is over, or raise why it cannot go on."""
    membership.abort = abort_groups
    member = _Member(config, corpora, membership)
    while (place := membership.next_place()) is not None:
        try:
            if member.work(place):
                membership.leave()
                return
        except StopRequested:
            raise
        except Exception as error:
            if not membership.outlives(error):
                raise
            _LOG.info("rank %d leaves generation %d: %s", place.world.rank, place.generation, error)
            _forget(error)
        member.let_go()


class _Member:
    """The objects of this process, across generations."""

    def __init__(self, config: RunConfig, corpora: Sequence[Path], membership: Membership) -> None:
        self._config, self._corpora, self._membership = config, corpora, membership
        self._accelerator: Accelerator | None = None
        self._archive = Archive(config.checkpoint.tiers.archive, shared_folder(config))
        self._kept: Survivor | None = None
        self._context: TrainerContext | None = None
        """The objects of this generation."""
        self._has_states = False
        """Whether the states in the context are those of the run."""
        self._loop: Loop | None = None
        self._ended = 0

    def work(self, place: Place) -> bool:
        """Do the work of a rank until all are done, a member dies or the run is asked to stop.

        Returns whether the job is over.
        """
        world, store, config = place.world, place.store, _of_generation(self._config, place)
        setup_logging(world.rank)
        if place.former_size:
            self._save_remains(place)
            return False
        if self._accelerator is None:
            self._accelerator = prepare_device(config, world)
        decision = self._agree(place)
        if decision.source == "checkpoint" and place.generation:
            config = _of_restart(config, world.rank)
        self._catch_up(decision)
        if decision.precision:  # measuring it again might choose another one
            config = config.changed("precision", name=decision.precision)
        self._log(place, decision)
        run_dir, stopped = Path(config.run.dir), None
        report_late = self._membership.report_late if self._membership.survives else None
        with Watchdog(
            config.watchdog, world, store, run_dir, run_dir / FAILURES, report_late
        ) as watchdog:
            with _logging_warnings_only() if place.generation else nullcontext():
                context = build_context(
                    config, self._corpora, world, store, self._accelerator, watchdog, self._archive
                )
                self._context = context
                context.checkpoints.tiers.prepare()
            self._membership.seal()
            continuation = self._continue(context, decision)
            loop = Loop(context, make_callbacks(context), self._membership.outlives)
            self._loop = loop
            if not self._membership.survives:
                # `freeze` excludes all present objects from later garbage collections. They live
                # as long as the run, and scanning them takes tens of milliseconds. Each rank would
                # scan in another step, and all ranks would wait each time.
                gc.collect()
                gc.freeze()
            try:
                with run_log(run_dir, world):
                    loop.run(continuation)
            except StopRequested as request:
                stopped = request
            destroy_groups()
        self._membership.finish()
        if stopped is not None:
            raise stopped
        return True

    def _catch_up(self, decision: Decision) -> None:
        """Bring what is kept to the step at which training continues, or give it up."""
        if self._kept is None:
            return
        if decision.source == "memory":
            self._kept.catch_up(decision)
        else:
            self._kept.let_go()
            self._kept = None
        gc.collect()  # the model of the last generation, before the next one is built

    def _save_remains(self, place: Place) -> None:
        try:
            save_remains(self._config, place, self._kept)
        except CheckpointError as error:
            _LOG.error("the remaining ranks could not save the last step: %s", error)
        self._membership.report_done()

    def let_go(self) -> None:
        """Keep the states, and give up everything else that belongs to the generation."""
        context = self._context
        if context is not None:
            # writers wait for other ranks until their connections are cut, so `leave` comes later
            context.checkpoints.tiers.abandon()
        self._membership.leave()
        abort_groups()  # the device, and the destruction of a group, would wait for the dead rank
        if context is not None and self._has_states:
            loop = self._loop
            ended = loop.ended if loop else self._ended
            self._kept = Survivor(context, ended, loop.unjudged if loop else None)
        elif context is not None:
            context.states.close()
        self._context = self._loop = context = None
        self._has_states = False
        with suppress(RuntimeError):  # the groups' connections are gone
            destroy_groups()
        forget_groups()
        _end_graph()
        gc.collect()

    def _agree(self, place: Place) -> Decision:
        world, config = place.world, self._config
        if not place.generation:
            return Decision("checkpoint", "this is the first start")
        own = Report(False, ended=recorded_steps(Path(config.run.dir)) if not world.rank else 0)
        if self._kept is not None and self._kept.ranks == world.size:
            own = self._kept.report()

        def decide_all(reports: list[Report]) -> Decision:
            decision, _ = decide_for_run(config, world.size, world.ranks_per_node, reports)
            saves = decision.sums is not None and is_overdue(config, decision.sums.step)
            return replace(decision, saves=saves)

        return agree(config, place, own, decide_all)

    def _continue(self, context: TrainerContext, decision: Decision) -> Continuation | None:
        """Fill the new objects with the states in memory, if there are some. Collective."""
        if decision.source == "checkpoint":
            self._has_states, self._ended = True, 0
            return None
        assert decision.lenders is not None
        context.states.settle()
        lend(context.states, self._kept, decision.lenders)
        restore_counters(context, decision)
        # if another rank dies from now on, this one keeps the new states and not the old copy
        self._has_states, self._ended, self._kept = True, decision.ended, None
        progress = context.progress
        missed = missed_updates(context.states, progress.to_meta())
        context.states.adopt(progress.updates, progress.step, missed)
        return Continuation(progress.step, decision.ended, decision.saves)

    def _log(self, place: Place, decision: Decision) -> None:
        if place.world.rank or not place.generation:
            return
        if decision.source == "checkpoint":
            _LOG.warning("ranks were replaced, and the run resumes (%s)", decision.reason)
        else:
            assert decision.sums is not None
            new = ", ".join(map(str, decision.lenders or ()))
            _LOG.warning(
                "ranks were replaced (%s), and training continues after step %d",
                new or "none; connections were lost",
                decision.sums.step,
            )


@contextmanager
def _logging_warnings_only() -> Iterator[None]:
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _of_generation(config: RunConfig, place: Place) -> RunConfig:
    config = fitted_to(config, place.world.size)
    if place.timeout_seconds is None:
        return config
    return config.changed("recovery", timeout_seconds=place.timeout_seconds)


def _of_restart(config: RunConfig, rank: int) -> RunConfig:
    """Return the configuration with which a run resumes; rank 0 prepares the run directory."""
    if rank == 0:
        return prepare_restart(config)
    return config.changed("run", resume="auto")


def _forget(error: BaseException) -> None:
    """Free the objects in the frames of an error, and of those that led to it."""
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__


def _end_graph() -> None:
    """Run a tiny backward pass: autograd keeps the graph of an interrupted one until the next."""
    parameter = torch.nn.Parameter(torch.ones(1))
    (parameter * parameter).sum().backward()
