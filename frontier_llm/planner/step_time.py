"""Predict the seconds of a training step from the seconds of its pipeline stages.

A stage takes f seconds for the forward pass and b seconds for the backward pass of a micro-batch,
and computes M micro-batches. The pipeline bubble is the time in which it waits for the other
stages. With C virtual stages per stage, it waits for passes of single model chunks, which take 1/C
of the time (Narayanan et al., SC'21, section 2.2):

    seconds of all passes = M max(f + b) + (sum of f + b over the other stages) / C

Schedules that split backward passes have no such formula. Their bubble is simulated (timeline.py).

f and b include the communication of model states that is not hidden behind computation. Work that
happens once per step follows the passes: the sum of gradients over replicas, the refresh (the
gather of updated parameters), the gradient norm, the update, and waiting for checkpoints.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from frontier_llm.geometry.host_pool import STATE_BYTES
from frontier_llm.geometry.inventory import chunk_parameters
from frontier_llm.geometry.model_chunks import ModelChunk
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.planner.block import Product
from frontier_llm.planner.candidate import Candidate, StageKind
from frontier_llm.planner.communication import Cost
from frontier_llm.planner.compute import Speed
from frontier_llm.planner.layout_time import ChunkPasses, LayoutTime, Passes
from frontier_llm.planner.timeline import ActionSeconds, Send

NORM_BYTES = 4
"""Bytes read per element of the fp32 gradient to compute the gradient norm."""
UPDATE_BYTES = {"adamw": 28, "adamw_8bit": 64, "muon": 44, "adafactor": 40}
"""Bytes moved to update an element in fp32. AdamW reads the gradient, the master weight and two
moments, and writes the master weight and the moments. Muon reads and writes in three kernels: the
momentum, the matrix that is orthogonalised, and the master weight. Adafactor reads the gradient to
add up its squares, divides it in place, adds up the squares of the result and of the weights, and
scales and adds it. Moments in 8 bits are decoded to fp32 before the update and encoded after it."""
ITERATIONS = 5
"""Iterations of Newton and Schulz in Muon."""


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step and of its parts."""

    seconds: float
    parts: dict[str, float]
    """Seconds of the slowest stage by kind of work, such as `compute` or `bubble`. They add up to
    `seconds`."""
    exposed: dict[str, float]
    """Seconds of communication that is not hidden behind computation, by name of the link."""
    actions: tuple[tuple[ActionSeconds, ...], ...]
    """For each kind of stage and each of its virtual stages, the seconds of one micro-batch."""
    send: Send

    @property
    def bubble_fraction(self) -> float:
        """Share of the step in which the slowest stage waits for other stages."""
        return self.parts["bubble"] / self.seconds


def step_seconds(candidate: Candidate, layout: LayoutTime, *, is_least: bool = False) -> float:
    """Predict the seconds of a step, without those of its parts.

    With `is_least` the result is a lower bound, for which no schedule is simulated.
    """
    stages = [_Stage(candidate, layout, passes) for passes in layout.passes]
    step = _pass_seconds(layout, stages, is_least=is_least)
    step += max(sum(stage.per_step.values()) for stage in stages)
    return step + checkpoint_stall_seconds(candidate, step)


def step_time(candidate: Candidate, layout: LayoutTime | None = None) -> StepTime:
    """Predict the seconds of a step and of its parts.

    `layout` has the times that do not depend on the sharding factors, if already computed.

    Raises:
        ConfigError: the cluster's speed in this precision is not known.
    """
    layout = layout or LayoutTime(candidate)
    stages = [_Stage(candidate, layout, passes) for passes in layout.passes]
    micro_batches = candidate.layout.micro_batches
    all_passes = _pass_seconds(layout, stages)
    slowest = max(stages, key=lambda stage: stage.seconds)
    # the stage with the longest work after the passes
    last = max(stages, key=lambda stage: sum(stage.per_step.values()))
    parts = {name: micro_batches * seconds for name, seconds in slowest.per_micro_batch.items()}
    parts["bubble"] = all_passes - micro_batches * slowest.seconds
    parts |= last.per_step
    step = all_passes + sum(last.per_step.values())
    parts["checkpoint"] = checkpoint_stall_seconds(candidate, step)
    exposed = [Cost(micro_batches * cost, link) for cost, link in slowest.costs_per_micro_batch]
    return StepTime(
        seconds=step + parts["checkpoint"],
        parts=parts,
        exposed=_by_link([*exposed, *last.costs_per_step]),
        actions=tuple(stage.actions for stage in stages),
        send=layout.send,
    )


def _pass_seconds(
    layout: LayoutTime, stages: Sequence["_Stage"], *, is_least: bool = False
) -> float:
    seconds = [stage.seconds for stage in stages]
    waited_for = [stage.waited_for for stage in stages] if layout.splits_backward else []
    return layout.pipeline_seconds(seconds, waited_for, is_least=is_least)


def checkpoint_stall_seconds(candidate: Candidate, step_seconds: float) -> float:
    """Return the seconds that a run waits for checkpoints, averaged over all steps.

    Each node writes the states of its ranks to the last storage in the cluster file, if any. In
    mode `blocking` the run waits until everything is written. In mode `lazy` it waits only for the
    part that is not written yet when the next checkpoint is due. `step_seconds` has no checkpoints.
    """
    config = candidate.config
    checkpoint, storage = config.checkpoint, config.cluster.storage
    if checkpoint.mode == "off" or not storage:
        return 0.0
    steps = checkpoint.every_steps
    hidden = steps * step_seconds if checkpoint.mode == "lazy" else 0.0
    return max(0.0, checkpoint_write_seconds(candidate) - hidden) / steps


def checkpoint_write_seconds(candidate: Candidate) -> float:
    """Return the seconds in which the fullest node writes its states to the last storage."""
    storage = candidate.config.cluster.storage
    if not storage:
        return 0.0
    writers = min(candidate.grid.ranks_per_node, candidate.grid.size)
    rank_bytes = max(_rank_bytes(candidate, kind) for kind in candidate.stages.kinds)
    return writers * rank_bytes / (storage[-1].write_gb_per_second * 1e9)


def checkpoint_bytes(candidate: Candidate) -> float:
    """Return the bytes of a checkpoint of all ranks."""
    kinds = candidate.stages.kinds
    of_stages = sum(kind.count * _rank_bytes(candidate, kind) for kind in kinds)
    return of_stages * candidate.grid.tensor * candidate.factors.optimizer


def _rank_bytes(candidate: Candidate, kind: StageKind) -> float:
    layout = candidate.layout
    if layout.optimizer.name == "adamw":  # a search need not count each unit
        return STATE_BYTES * kind.elements / layout.factors.optimizer
    return layout.saved_bytes(kind.first)


class _Stage:
    """The seconds of one kind of stage, including the communication of its model states.

    Communication counts only as far as it is not hidden behind computation.
    """

    def __init__(self, candidate: Candidate, layout: LayoutTime, passes: Passes) -> None:
        self._layout, self._units = layout, sum(count for _, count in passes.kind.units)
        costs = layout.rates.state_costs(candidate, passes.kind)
        conversions, tied = costs.conversions, costs.tied
        runs = [run for of_chunk in passes.kind.chunk_units for run in of_chunk]
        tables = sum(run.elements * run.count for run in runs if run.what == "table")
        grads = candidate.factors.grads
        reduced = costs.elements / grads if grads > 1 else 0.0
        accumulation = layout.accumulation_seconds(costs.elements, tables, reduced)
        forward = sum(chunk.compute.forward for chunk in passes.chunks)
        backward = sum(chunk.backward_compute for chunk in passes.chunks) + accumulation
        sent_gather = self._exposed(costs.gather.seconds, forward)
        again = costs.gather_again.seconds
        traffic = again + costs.scatter.seconds  # of a backward pass
        exposed, share = self._exposed(traffic, backward), again / traffic if traffic else 0.0
        sent_again, sent_reduce = exposed * share, exposed * (1 - share)
        gather = sent_gather + conversions.gather
        gather_again = sent_again + conversions.gather_again
        reduce = sent_reduce + conversions.scatter
        self.per_micro_batch = {
            "compute": forward + backward,
            "tensor": passes.tensor.seconds,
            "context": passes.context.seconds,
            "host": sum(chunk.waits for chunk in passes.chunks),
            "exchange": passes.exchange.seconds,
            "gather_params": gather + gather_again,
            "reduce_grads": reduce,
        }
        self._chunks, self._states = passes.chunks, (gather, gather_again, reduce + accumulation)
        # the last backward pass hides sums over replicas, the next forward pass the refresh
        sums = self._exposed(costs.sums.seconds, backward, traffic)
        refresh = self._exposed(costs.refresh.seconds, forward, costs.gather.seconds)
        update = update_seconds(candidate.layout, passes.kind.chunks, costs.elements, layout.speed)
        self.per_step = {
            "reduce_states": sums + conversions.sums + tied.seconds,
            "refresh_params": refresh + conversions.refresh,
            "update": update + layout.host.step_seconds,
        }
        self.costs_per_micro_batch = [
            passes.tensor,
            passes.context,
            passes.exchange,
            Cost(sent_gather + sent_again, costs.gather.link),
            Cost(sent_reduce, costs.scatter.link),
        ]
        self.costs_per_step = [Cost(sums, costs.sums.link), tied, Cost(refresh, costs.refresh.link)]

    @cached_property
    def seconds(self) -> float:
        return sum(self.per_micro_batch.values())

    @cached_property
    def actions(self) -> tuple[ActionSeconds, ...]:
        """Seconds of the actions in each chunk of one micro-batch."""
        total = sum(chunk.seconds for chunk in self._chunks)
        return tuple(
            _with_states(chunk, chunk.seconds / total, *self._states) for chunk in self._chunks
        )

    @property
    def waited_for(self) -> float:
        """Seconds of the forward passes and input gradients of one micro-batch."""
        return sum(actions.forward + actions.input_gradients for actions in self.actions)

    def _exposed(self, seconds: float, computation: float, traffic: float = 0.0) -> float:
        """Return the seconds that `computation` does not hide after the `traffic` that it does."""
        before = traffic - self._layout.hidden(traffic, computation, self._units)
        traffic += seconds
        return traffic - self._layout.hidden(traffic, computation, self._units) - before


def _with_states(
    chunk: ChunkPasses, share: float, gather: float, gather_again: float, reduce: float
) -> ActionSeconds:
    """Return the seconds of a chunk's actions with its share of the model states of its stage.

    `gather` belongs to forward passes, `gather_again` to input gradients, and `reduce`, which adds
    up and reduces gradients, to weight gradients.
    """
    actions = chunk.actions
    return ActionSeconds(
        forward=actions.forward + share * gather,
        backward=actions.backward + share * (gather_again + reduce),
        input_gradients=actions.input_gradients + share * gather_again,
        weight_gradients=actions.weight_gradients + share * reduce,
    )


def _by_link(costs: Iterable[Cost]) -> dict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for cost in costs:
        if cost.link:
            total[cost.link] += cost.seconds
    return dict(total)


def update_seconds(
    layout: ResolvedLayout, chunks: tuple[ModelChunk, ...], elements: int, speed: Speed
) -> float:
    """Return the seconds of the gradient norm and of the update of a rank's states.

    `elements` are those of all units of the stage on a tensor rank, padding included.
    """
    optimizer, share = layout.optimizer.name, layout.factors.optimizer
    moved = NORM_BYTES + UPDATE_BYTES[optimizer] + layout.compute_bytes
    seconds = speed.moved(float(elements // share) * moved)
    if optimizer == "muon":
        seconds += orthogonal_seconds(layout, chunks, speed) / share
    return seconds


def orthogonal_seconds(
    layout: ResolvedLayout, chunks: tuple[ModelChunk, ...], speed: Speed
) -> float:
    """Return the seconds to orthogonalise all matrices of a stage, whole, on one device.

    An iteration multiplies a matrix [m, n], m <= n, by its transpose, the result by itself, and the
    matrix by the sum.
    """
    seconds = 0.0
    for shape in _matrices(layout, chunks):
        m, n = sorted(shape)
        products = Product(m, n, m), Product(m, m, m), Product(m, m, n)
        seconds += ITERATIONS * sum(speed.product(product) for product in products)
    return seconds


def _matrices(layout: ResolvedLayout, chunks: tuple[ModelChunk, ...]) -> Iterator[tuple[int, int]]:
    """Yield the shapes of the matrices of layers; query, key and value are separate."""
    model = layout.model
    for chunk in chunks:
        for shape in chunk_parameters(model, chunk, layout.sequence_length):
            if not shape.is_matrix_of_layer:
                continue
            side = model.side(int(shape.unit.removeprefix("layers.")))
            query, key = side.heads * side.head_dim, side.kv_heads * side.head_dim
            pair = dict.fromkeys(("attention.key_value", "cross_attention.key_value"), (key, key))
            fused = {"attention.qkv": (query, key, key), **pair}
            for rows in fused.get(shape.module, (shape.shape[0],)):
                yield rows, shape.shape[1]
