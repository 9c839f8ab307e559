"""What a process keeps of its rank while the ranks of a run connect again after a death.

If no process is left for another rank, the remaining ranks save what they have in memory. The
states are complete if each one is in the memory of a remaining rank. They are then saved as a
checkpoint of the last step in the run directory, from which the run continues on fewer ranks, or
resumes in another job.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from frontier_llm.checkpoint.commit_barrier import Ranks
from frontier_llm.checkpoint.folders import committed
from frontier_llm.checkpoint.manager import CheckpointManager
from frontier_llm.checkpoint.write_plan import part_of
from frontier_llm.checkpoint.writer import Options
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.elastic import fitted_to
from frontier_llm.geometry.lengths import sample_lengths
from frontier_llm.membership.member import Place
from frontier_llm.protocols import StateShard
from frontier_llm.recovery.agreement import Decision, Report, agree, decide_for_run
from frontier_llm.saving.tiers import shared_folder
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.trainer.context import TrainerContext
from frontier_llm.trainer.learning_rate import LearningRate
from frontier_llm.trainer.progress import LossScale, Progress

_LOG = logging.getLogger(__name__)


class Survivor:
    """The optimizer states and counters of a rank after its last update.

    The model, its gradients and the process groups are given up: they are built again. `ended` is
    the last step that the loop has ended. `unjudged` are the counters of `Progress` after the last
    update, before callbacks saw it; None if no step was done.

    The states are those of `rank` among `ranks`. `shards` are these states, once the rank has
    caught up with the others. `meta` is what is saved besides them, as plain JSON.
    """

    def __init__(
        self, context: TrainerContext, ended: int, unjudged: Mapping[str, Any] | None
    ) -> None:
        self._states: ShardedStates | None = context.states
        self._step, self._rate = context.train_step, LearningRate.of(context.config)
        self._sums, self._ended, self._unjudged = context.train_step.sums, ended, unjudged
        self._counters = {
            "progress": context.progress.to_meta(),
            "loss_scale": context.train_step.loss_scale.to_meta(),
            **context.data.to_meta(),
        }
        self.rank, self.ranks = context.world.rank, context.world.size
        self._precision = context.hardware.precision.name
        self.shards: list[StateShard] = []
        self.meta = context.checkpoints.meta()

    def report(self) -> Report:
        """Return what this rank has, for the agreement."""
        found = self._sums, self._ended, self._counters, self._precision, self.rank
        return Report(True, *found, self._unjudged)

    def catch_up(self, decision: Decision) -> None:
        """Repeat the update that other ranks have done and this one has not, then keep only states.

        The gradients of the step are in memory until then.
        """
        if self._states is None:
            return  # in an earlier generation that failed
        own, sums = self._sums, decision.sums
        assert sums is not None
        if own is None or own.step < sums.step:
            self._step.repeat_update(sums, self._rate(sums.step))
            self._sums = sums
        self.shards = [_without_parameter(s) for s in self._states.shards(writable=True)]
        self.let_go()

    def let_go(self) -> None:
        """Give up model and gradients. Unless their hooks are removed, they are never freed."""
        if self._states is not None:
            self._states.close()
            self._states = None
            del self._step


def tensors_of(shards: Iterable[StateShard]) -> Iterator[torch.Tensor]:
    """Yield optimizer states, [elements] fp32 each, in an order that replicas share."""
    for shard in shards:
        for values in shard.states.values():
            assert isinstance(values, torch.Tensor)
            yield values


def counters_after(decision: Decision, config: RunConfig) -> dict[str, Any]:
    """Return the counters after the last update, as plain JSON."""
    counters, sums = decision.counters, decision.sums
    assert counters is not None
    assert sums is not None
    progress, loss_scale = Progress(), LossScale(config.precision, decision.precision)
    progress.load_meta(counters["progress"])
    loss_scale.load_meta(counters["loss_scale"])
    if progress.step < sums.step:  # the rank that reported them was still ending the update
        loss_scale.update(finite=not sums.skipped)
        length = sample_lengths(config.model, config.data).total
        alone = config.optimizer.cross_attention_steps
        progress.advance(config.data.global_batch, length, skipped=sums.skipped, alone=alone)
    assert progress.step == sums.step, (progress, sums)
    found = {"progress": progress.to_meta(), "loss_scale": loss_scale.to_meta()}
    return {**counters, **found}


def restore_counters(context: TrainerContext, decision: Decision) -> None:
    """Set the counters of a context to those after the last update."""
    counters = counters_after(decision, context.config)
    context.progress.load_meta(counters["progress"])
    context.train_step.loss_scale.load_meta(counters["loss_scale"])
    context.data.resume(counters, context.progress.next_sample)
    context.train_step.sums = decision.sums


def _without_parameter(shard: StateShard) -> StateShard:
    """Return a shard that does not keep the parameter, and with it the model, in memory."""
    shape = torch.empty(shard.record.parameter.shape, device="meta")
    record = replace(shard.record, parameter=torch.nn.Parameter(shape, requires_grad=False))
    return replace(shard, record=record)


def lend(states: ShardedStates, own: Survivor | None, lenders: Mapping[int, int]) -> None:
    """Fill the states of this rank: from its own copy, or with those of another rank.

    Collective over the ranks that lend or borrow. The states are overwritten, and `adopt` must
    follow. `lenders` has, by rank without states, the rank that sends it a copy.
    """
    rank = dist.get_rank()
    tensors = list(tensors_of(states.shards(writable=True)))
    with torch.no_grad():
        if own is not None:
            for target, source in zip(tensors, tensors_of(own.shards), strict=True):
                target.copy_(source)
        for borrower, lender in sorted(lenders.items()):
            if rank in (lender, borrower):
                send_or_receive = dist.isend if rank == lender else dist.irecv
                other = borrower if rank == lender else lender
                for tensor in tensors:
                    # a batch uses the communicator of all ranks, and makes none for the two ranks
                    message = dist.P2POp(send_or_receive, tensor, other)
                    for work in dist.batch_isend_irecv([message]):
                        work.wait()


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
    decision = agree(
        config, place, own, partial(_decide_remains, former, size, world.ranks_per_node)
    )
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
    timeout = timedelta(seconds=settings.timeout_seconds)
    ranks = Ranks(world.rank, world.size, place.store, timeout)
    options = Options(keep_every_steps=settings.keep_every_steps)
    folder = shared_folder(config)
    manager = CheckpointManager(folder, ranks, "blocking", settings.keep, options)
    manager.prepare(shards)
    manager.begin(decision.sums.step, shards, meta)
    if world.rank == 0:
        _LOG.warning("the remaining ranks have saved step %d", decision.sums.step)


def _decide_remains(config: RunConfig, size: int, per_node: int, found: list[Report]) -> Decision:
    if config.checkpoint.mode == "off":
        return Decision("checkpoint", "checkpoint.mode=off")
    reports = [Report(False)] * size
    for report in found:
        if report.rank is not None:
            reports[report.rank] = report
    decision, places = decide_for_run(config, size, per_node, reports)
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
    return replace(decision, parts=parts)
