"""Divide unlike layers over a pipeline so that its most expensive stage costs the least.

The layers of an encoder cost more or less than those of a decoder, layers with a window less than
those without, and the stage with the head has a product with the whole vocabulary in addition.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from frontier_llm.geometry.flops import equal_layers
from frontier_llm.geometry.inventory import chunk_parameters
from frontier_llm.geometry.model_chunks import ModelChunk, split_layers
from frontier_llm.geometry.pipeline_schedule import Placement
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.planner.compute import with_host
from frontier_llm.planner.layout_time import LayoutTime

LEAST_GAIN = 0.01
"""Share of the seconds that a choice must save to be preferred to what is usual."""
GAIN_OF_EQUAL_LAYERS = 0.1
"""The same for layers that are alike, whose stages differ only by the embedding and the head. Even
stages are what people expect, and predictions err by some percent."""
Sizes = tuple[int, ...]
"""Number of layers of each model chunk, in the order of the model."""
Cost = Callable[[int, int], float]
"""Returns the seconds of a micro-batch in a chunk, given its first layer and the one after its
last. The first chunk has the embedding, the last one the head."""


def balanced_layers(layout: ResolvedLayout, time: LayoutTime) -> Sizes | None:
    """Return the layers of each chunk for equal seconds of all stages, as far as layers allow.

    None = an even split is about as good. `time` is that of the layout with an even split.
    """
    if layout.grid.pipeline == 1:
        return None
    return cheapest_split(chunk_cost(layout, time), layout.model.layers, layout.placement)


def chunk_cost(layout: ResolvedLayout, time: LayoutTime) -> Cost:
    """Predict the seconds of each kind of layer once, with sums of gradients.

    The device and its CPU work at the same time, so their seconds are added up separately.
    """
    model = layout.model

    def seconds(layers: range, *ends: bool) -> _Parts:
        chunk = ModelChunk(0, 0, layers, *ends)
        passes, splits = time.chunk_passes(chunk), layout.splits_backward
        parameters = chunk_parameters(model, chunk, layout.sequence_length)
        elements = sum(parameter.elements for parameter in parameters) / layout.grid.tensor
        added = time.accumulation_seconds(elements)
        return _Parts(
            passes.on_device.total(splits=splits), passes.host.total(splits=splits), added
        )

    of_layers = [_Parts()] * model.layers
    for equal in equal_layers(model, range(model.layers)):
        each = seconds(range(equal[-1], equal[-1] + 1), False, False)
        for layer in equal:
            of_layers[layer] = each
    if model.encoder_embedding:  # that of the decoder belongs to its first layer
        begins = model.encoder_layers
        of_layers[begins] = seconds(range(begins, begins + 1), False, False)
    ends = seconds(range(0), True, False), seconds(range(0), False, True)
    until = list(accumulate([ends[0], *of_layers, ends[1]], _Parts.plus, initial=_Parts()))

    def cost(first: int, end: int) -> float:
        # the embedding comes before the first layer, and the head after the last one
        before = until[first + 1 if first else 0]
        after = until[end + 1 if end < model.layers else -1]
        device, host, added = map(operator.sub, after, before)
        together = with_host(device, host) if time.speed.has_host else device + host
        return float(together + added)

    return cost


class _Parts(NamedTuple):
    """Seconds of a micro-batch."""

    device: float = 0.0
    host: float = 0.0
    """Seconds of the CPU to start the kernels."""
    added: float = 0.0
    """Seconds to add gradients to their sums."""

    def plus(self, other: "_Parts") -> "_Parts":
        return _Parts(*map(operator.add, self, other))


def stage_costs(cost: Cost, placement: Placement, sizes: Sequence[int]) -> list[float]:
    """Return the seconds of a micro-batch on each stage."""
    of_stages, first = [0.0] * placement.stages, 0
    for chunk, size in enumerate(sizes):
        of_stages[placement.stage(chunk)] += cost(first, first + size)
        first += size
    return of_stages


def cheapest_split(cost: Cost, layers: int, placement: Placement) -> Sizes | None:
    """Return the layers of each chunk whose most expensive stage costs the least.

    None = an even split costs at most LEAST_GAIN more. With one chunk per stage the result is the
    best one, and the one with the most even stages if there are several. With more chunks, layers
    are moved from an even split until no move off the most expensive stage helps.
    """
    even = split_layers(layers, placement.chunks)
    limit = (1 - LEAST_GAIN) * max(stage_costs(cost, placement, even))
    if placement.virtual_stages > 1:
        found = _moved(cost, placement, even)
        return found if max(stage_costs(cost, placement, found)) <= limit else None
    least = _one_chunk_each(cost, layers, placement.stages, limit, max)
    if least is None:
        return None
    squares = _one_chunk_each(
        cost, layers, placement.stages, least[0], lambda sum_, x: sum_ + x * x
    )
    assert squares is not None
    return squares[1]


def _one_chunk_each(
    cost: Cost, layers: int, stages: int, limit: float, join: Callable[[float, float], float]
) -> tuple[float, Sizes] | None:
    """Return the least joined cost of all stages and its split, by dynamic programming.

    No stage may cost more than `limit`; None = that is not possible.
    """
    found: dict[int, tuple[float, Sizes]] = {0: (0.0, ())}
    for stage in range(stages):
        extended: dict[int, tuple[float, Sizes]] = {}
        last = layers - (stages - 1 - stage)  # one layer is left for each later stage
        for first, (before, sizes) in found.items():
            for end in range(first + 1, last + 1):
                seconds = cost(first, end)
                if seconds > limit * (1 + 1e-9):  # sums are rounded
                    break
                option = join(before, seconds), (*sizes, end - first)
                extended[end] = min(option, extended.get(end, option))
        found = extended
    return found.get(layers)


def _moved(cost: Cost, placement: Placement, sizes: Sizes) -> Sizes:
    of_stages = stage_costs(cost, placement, sizes)
    while True:
        options = []
        for moved in _moves(placement, sizes, of_stages.index(max(of_stages))):
            after = stage_costs(cost, placement, moved)
            options.append((max(after), sum(x * x for x in after), moved, after))
        if not options or min(options)[0] >= max(of_stages) * (1 - 1e-9):
            return sizes
        _, _, sizes, of_stages = min(options)


def _moves(placement: Placement, sizes: Sizes, stage: int) -> Iterator[Sizes]:
    """Yield the splits with one layer less in a chunk of a stage, and one more in another chunk."""
    for giver, size in enumerate(sizes):
        if placement.stage(giver) != stage or size == 1:
            continue
        for taker in range(len(sizes)):
            if placement.stage(taker) != stage:
                moved = list(sizes)
                moved[giver] -= 1
                moved[taker] += 1
                yield tuple(moved)
