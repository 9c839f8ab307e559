"""Predict the part of a step that does not depend on the sharding factors.

It consists of computation, tensor parallel communication and sends between stages. It is a lower
bound on the step with any sharding factors, and a search computes it once for all of them.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from frontier_llm.geometry.flops import has_unlike_layers
from frontier_llm.geometry.model_chunks import ModelChunk
from frontier_llm.geometry.state_memory import FP32_BYTES
from frontier_llm.planner.candidate import Candidate, Memo, StageKind
from frontier_llm.planner.communication import Cost, GridGroups, Network
from frontier_llm.planner.compute import Host, Seconds, Speed, chunk_seconds, host_times, with_host
from frontier_llm.planner.state_costs import StateCosts, tied_distance
from frontier_llm.planner.timeline import ActionSeconds, Send, least_pass_seconds, pass_seconds

SPLIT_SHARE = 0.04
"""Seconds that input gradients and weight gradients take in addition if they are two actions, as a
share of the seconds of one backward pass: 3% to 5% on two CPU ranks with a GPT of 8 layers."""


@dataclass(frozen=True)
class ChunkPasses:
    """Seconds of a micro-batch in one model chunk, without communication of model states."""

    compute: Seconds
    tensor: ActionSeconds
    """Seconds of the communication of tensor and of context ranks."""
    host: ActionSeconds
    """Seconds of the CPU to start the kernels of each kind of action."""
    outside: float
    """Seconds of the CPU outside the layers, during which the device waits."""
    splits: bool
    overlaps_host: bool
    """Whether the CPU works while the device computes, because they are different processors."""

    @cached_property
    def on_device(self) -> ActionSeconds:
        """Seconds of each kind of action on a device that never waits for its CPU."""
        compute, tensor = self.compute, self.tensor
        gradients = compute.input_gradients + compute.weight_gradients
        split = 1 + SPLIT_SHARE
        return ActionSeconds(
            forward=compute.forward + tensor.forward,
            backward=gradients + compute.recomputed + tensor.backward,
            input_gradients=compute.input_gradients * split
            + compute.recomputed
            + tensor.input_gradients,
            weight_gradients=compute.weight_gradients * split + tensor.weight_gradients,
        )

    @cached_property
    def actions(self) -> ActionSeconds:
        """Seconds of each kind of action."""
        joined = with_host if self.overlaps_host else operator.add
        forward, *others = map(joined, self.on_device, self.host)
        return ActionSeconds(forward + self.outside, *others)

    @cached_property
    def seconds(self) -> float:
        """Seconds of the forward pass and of all gradients."""
        return self.actions.total(splits=self.splits)

    @cached_property
    def waits(self) -> float:
        """Seconds in which the device waits for its CPU."""
        return self.seconds - self.on_device.total(splits=self.splits)

    @property
    def backward_compute(self) -> float:
        """Seconds of computation of all gradients, including recomputation."""
        gradients = self.compute.input_gradients + self.compute.weight_gradients
        split = 1 + SPLIT_SHARE if self.splits else 1.0
        return gradients * split + self.compute.recomputed


@dataclass(frozen=True)
class Passes:
    """Seconds of a micro-batch on one kind of stage, without communication of model states."""

    kind: StageKind
    chunks: tuple[ChunkPasses, ...]
    tensor: Cost
    context: Cost
    exchange: Cost

    @property
    def seconds(self) -> float:
        """Seconds of the forward pass and of all gradients."""
        return sum(chunk.seconds for chunk in self.chunks) + self.exchange.seconds


class Rates(Memo):
    """The speeds of the device, the CPU and the links for all layouts on the same grid."""

    def __init__(self, candidate: Candidate) -> None:
        super().__init__()
        cluster, layout = candidate.config.cluster, candidate.layout
        self.engine = candidate.config.planner.engine
        self.speed = Speed(cluster.device, layout.precision, self.engine.product_ratio)
        times = host_times(cluster.device, self.engine, layout.precision)
        self.host = Host(times, layout.grid.tensor)
        self.groups = GridGroups(Network(cluster, layout.grid.ranks_per_node), layout.grid)
        self.has_unlike_layers = has_unlike_layers(layout.model)

    def state_costs(self, candidate: Candidate, kind: StageKind) -> StateCosts:
        """Return the costs of the model states of a kind of stage."""
        return self.once(
            (candidate.factors, kind.units, tied_distance(candidate, kind)),
            lambda: StateCosts(candidate, kind, self.groups, self.engine, self.speed),
        )


class LayoutTime:
    """The seconds of a layout that do not depend on its sharding factors.

    `rates` may be known from a layout on the same grid, with the same model and cluster.
    """

    def __init__(self, candidate: Candidate, rates: Rates | None = None) -> None:
        layout = candidate.layout
        self._kernels = candidate.config.kernels
        self.rates = rates = rates or Rates(candidate)
        self.engine, self.speed = rates.engine, rates.speed
        self.host, self.groups = rates.host, rates.groups
        self._stages = candidate.stages
        self._layout = layout
        self.splits_backward = layout.splits_backward
        chunks = [self._chunks(kind) for kind in candidate.stages.kinds]
        self.send = self._send_seconds(chunks)
        self.passes = [
            self._passes(kind, of_kind)
            for kind, of_kind in zip(candidate.stages.kinds, chunks, strict=True)
        ]

    def accumulation_seconds(
        self, elements: float, tables: float = 0.0, reduced: float = 0.0
    ) -> float:
        """Return the seconds to add gradients to the sums; compiled layers read the sums, too.

        If weight gradients were measured, these contain it. There remain the gradients of `tables`,
        which autograd clears and which are added then, and from the second micro-batch on the
        `reduced` elements of sharded gradients.
        """
        if self.speed.weight_gradient_ratio is not None:
            added = 2 * tables + 3 * reduced * (1 - 1 / self._layout.micro_batches)
            return self.speed.moved(2 * tables * self._layout.compute_bytes + added * FP32_BYTES, 0)
        compiles = self.engine.follows_kernels and self._kernels == "compiled"
        read_bytes = self._layout.compute_bytes if compiles else 0
        return self.speed.moved(elements * (self.engine.accumulation_bytes + read_bytes))

    @property
    def bound_seconds(self) -> float:
        """Lower bound on the seconds of a step with any sharding factors, without simulation."""
        seconds = [passes.seconds for passes in self.passes]
        waited_for = [self._waited_for(passes) for passes in self.passes]
        return self.pipeline_seconds(seconds, waited_for, is_least=True)

    def pipeline_seconds(
        self, seconds: Sequence[float], waited_for: Sequence[float], *, is_least: bool = False
    ) -> float:
        """Return the seconds of all actions of a step, including the pipeline's bubble.

        If the schedule splits backward passes, its bubble is simulated without communication of
        model states. With it, the bubble grows like the actions for which other stages wait. For a
        lower bound (`is_least`), nothing is simulated. `seconds` has for each kind of stage the
        seconds of one micro-batch, and `waited_for` those of forward passes and input gradients,
        which count only if backward passes are split.
        """
        if not self.splits_backward:
            return self._closed_form(seconds)
        growth = max(waited_for) / max(self._waited_for(passes) for passes in self.passes)
        bubble = self._least_bubble_seconds if is_least else self._bubble_seconds
        return self._layout.micro_batches * max(seconds) + bubble * growth

    @staticmethod
    def _waited_for(passes: Passes) -> float:
        actions = [chunk.actions for chunk in passes.chunks]
        return sum(action.forward + action.input_gradients for action in actions)

    def hidden(self, traffic: float, computation: float, units: int) -> float:
        """Return the seconds of communication that are hidden behind computation.

        There is a message per sharding unit. One message is never hidden, because computation waits
        for the first gather, and the last reduction follows it.
        """
        if not self.engine.overlaps:
            return 0.0
        share = self.speed.hidden_share
        return share * min(traffic * (1 - 1 / max(units, 1)), computation)

    @cached_property
    def _bubble_seconds(self) -> float:
        """Seconds that the slowest stage waits in a step, without traffic of model states."""
        return self._bubble(pass_seconds(self._layout, self._actions, self.send))

    @cached_property
    def _least_bubble_seconds(self) -> float:
        """Lower bound on `_bubble_seconds`."""
        return self._bubble(least_pass_seconds(self._layout, self._actions))

    @property
    def _actions(self) -> list[list[ActionSeconds]]:
        seconds = [[chunk.actions for chunk in passes.chunks] for passes in self.passes]
        return self._stages.of_stages(seconds)

    def _bubble(self, total: float) -> float:
        slowest = max(passes.seconds for passes in self.passes)
        return max(0.0, total - self._layout.micro_batches * slowest)

    def _closed_form(self, seconds: Sequence[float]) -> float:
        """Return the seconds of 1F1B and of the interleaved schedule with whole backward passes."""
        counts = [kind.count for kind in self._stages.kinds]
        slowest, layout = max(seconds), self._layout
        others = sum(s * count for s, count in zip(seconds, counts, strict=True)) - slowest
        return layout.micro_batches * slowest + others / layout.virtual_stages

    def _chunks(self, kind: StageKind) -> tuple[ChunkPasses, ...]:
        layout, outside = self._layout, self.host.micro_batch_seconds / len(kind.chunks)
        of_layout = layout.micro_batch, layout.recompute, self.splits_backward, outside

        def passes(chunk: ModelChunk) -> ChunkPasses:
            layers = chunk.layers if self.rates.has_unlike_layers else range(len(chunk.layers))
            key = (*of_layout, layers, chunk.has_embedding, chunk.has_head)
            return self.rates.once(key, lambda: self.chunk_passes(chunk, outside))

        return tuple(map(passes, kind.chunks))

    def chunk_passes(self, chunk: ModelChunk, outside: float = 0.0) -> ChunkPasses:
        """Return the seconds of a micro-batch in a chunk, with those of the CPU outside layers."""
        compute = chunk_seconds(self._layout, chunk, self.speed, self.engine, self._kernels)
        tensor = self._tensor_seconds(chunk, compute).plus(self._context_seconds(chunk))
        host, splits = self._host_seconds(chunk), self._layout.splits_backward
        return ChunkPasses(compute, tensor, host, outside, splits, self.speed.has_host)

    def _host_seconds(self, chunk: ModelChunk) -> ActionSeconds:
        """Return the seconds of the CPU; a recomputed layer is started once more."""
        forward = len(chunk.layers) * self.host.layer_seconds
        gradients = len(chunk.layers) * self.host.backward_seconds
        recomputed = forward if self._layout.recompute == "full" else 0.0
        return ActionSeconds(
            forward=forward,
            backward=gradients + recomputed,
            input_gradients=gradients / 2 + recomputed,
            weight_gradients=gradients / 2,
        )

    def _passes(self, kind: StageKind, chunks: tuple[ChunkPasses, ...]) -> Passes:
        splits, width = self._layout.splits_backward, self._layout.grid.context
        both = sum(chunk.tensor.total(splits=splits) for chunk in chunks)
        context = sum(self._context_seconds(chunk).total(splits=splits) for chunk in kind.chunks)
        return Passes(
            kind,
            chunks,
            tensor=Cost(both - context, self.groups.tensor.link),
            context=Cost(context, self.groups.data(width, 1).link),
            exchange=Cost(self._sends(kind) * self.send.occupied, self.groups.send(0).link),
        )

    def _tensor_seconds(self, chunk: ModelChunk, compute: Seconds) -> ActionSeconds:
        """Divide the traffic of a chunk over its actions, as that of its layers is divided.

        Each attention or feed-forward block has an all-reduce in each forward pass and one in the
        backward pass. With sequence parallelism, an all-gather and a reduce-scatter replace an
        all-reduce, and the input is gathered again for the weight gradients (half an all-reduce).

        A whole backward pass hides the reduction of input gradients behind the products of weight
        gradients, and the second gather behind those of input gradients. The constants of the
        clusters were fitted to such systems, so they give the seconds that are not hidden. If the
        backward pass is split, nothing is hidden.
        """
        layout = self._layout
        forwards = 2 if layout.recompute == "full" else 1
        regathered = 0.5 if layout.sequence_parallel else 0.0
        one_pass = self._exposed_tensor_seconds(chunk) / (forwards + 1 + regathered)
        hidden = self.hidden(one_pass, compute.weight_gradients, 2 * len(chunk.layers))
        return ActionSeconds(
            forward=one_pass,
            backward=one_pass * (forwards + regathered),
            input_gradients=one_pass * forwards + hidden * (1 - regathered),
            weight_gradients=one_pass * regathered + hidden * regathered,
        )

    def _context_seconds(self, chunk: ModelChunk) -> ActionSeconds:
        """Return the seconds in which context ranks exchange keys and values, which block.

        They are sent forward and once more backward, and then their gradients. Each time all ranks
        wait for the one that sends or receives most. How much that is depends on the documents of
        a sample, for which typical ones stand. Or heads are sent, before and after attention.
        """
        layout, context = self._layout, self._layout.grid.context
        if context == 1:
            return ActionSeconds(0.0, 0.0, 0.0, 0.0)
        traffic, layers = layout.activation_traffic, len(chunk.layers)
        size, messages, backwards = layout.context_work.rows * traffic.row_bytes, 1, 2
        if layout.exchanges_heads:
            to_one = traffic.lengths.decoder * traffic.head_exchange(context).sent
            size, messages = (context - 1) * to_one * traffic.head_bytes, 2
            backwards = 2 if layout.recompute == "full" else 1
        group = self.groups.data(context, 1)
        once = group.exchange(layers * layout.micro_batch * size, layers * messages).seconds
        return ActionSeconds(once, backwards * once, backwards * once, 0.0)

    def _exposed_tensor_seconds(self, chunk: ModelChunk) -> float:
        layout, group = self._layout, self.groups.tensor
        if layout.grid.tensor == 1:
            return 0.0
        traffic, layers = layout.activation_traffic, len(chunk.layers)
        norm_bytes, norm_messages = traffic.norm_bytes(chunk), traffic.norm_messages(chunk)
        norms = group.all_reduce(norm_bytes, norm_messages).seconds if norm_messages else 0.0
        sent = traffic.tensor_bytes(chunk) - norm_bytes
        # per layer, two all-reduces in each forward and in each backward pass
        all_reduces = layers * (6 if layout.recompute == "full" else 4)
        if layout.sequence_parallel:  # an all-gather and a reduce-scatter replace each all-reduce
            messages = 2 * all_reduces + layers
            share = all_reduces / messages if messages else 0.0  # of reduce-scatters
            norms += messages * self.host.tensor_wait_seconds
            return (
                group.collective("all_gather", (1 - share) * sent, all_reduces + layers).seconds
                + group.collective("reduce_scatter", share * sent, all_reduces).seconds
                + norms
            )
        waits = all_reduces * self.host.tensor_wait_seconds
        return group.all_reduce(sent, all_reduces).seconds + norms + waits

    def _sends(self, kind: StageKind) -> int:
        placement = self._layout.placement
        if placement.stages == 1:
            return 0
        if not placement.folded:  # an activation and a gradient per model chunk
            return 2 * placement.virtual_stages
        chunks = [placement.chunk(kind.first, index) for index in range(placement.virtual_stages)]
        neighbours = [chunk + step for chunk in chunks for step in (-1, 1)]
        return sum(
            0 <= chunk < placement.chunks and placement.stage(chunk) != kind.first
            for chunk in neighbours
        )

    def _send_seconds(self, chunks: Sequence[tuple[ChunkPasses, ...]]) -> Send:
        """Return the seconds of sending an activation or its gradient to the next stage."""
        layout, engine = self._layout, self.engine
        tensor, split = layout.grid.tensor, engine.split_exchange
        if layout.grid.pipeline == 1:
            return Send()
        sent = layout.boundary_bytes
        seconds = self.groups.send(sent / tensor if split else sent).seconds
        if split and tensor > 1:
            seconds += self.groups.tensor.gather(sent * (tensor - 1) / tensor).seconds
        if layout.virtual_stages == 1:
            return Send(seconds)
        # with virtual stages, sends overlap with computation
        sends = 2 * layout.virtual_stages
        computation = min(
            sum(chunk.compute.forward + chunk.backward_compute for chunk in of_kind)
            for of_kind in chunks
        )
        hidden = self.hidden(seconds, computation / sends, units=sends)
        return Send(seconds - hidden, hidden)
