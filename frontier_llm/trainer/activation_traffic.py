"""Counts the bytes of activations that the layers and the pipeline send in a step."""

from frontier_llm.collectives.traffic import Traffic
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.geometry.wire import ring_sent
from frontier_llm.parallel.groups import Groups


def count_activations(
    traffic: Traffic, groups: Groups, layout: ResolvedLayout, micro_batches: int
) -> None:
    """Count the bytes that this rank sends in its tensor group and to neighbouring stages.

    The bytes follow from formulas, which a test compares with the messages that are sent.
    """
    grid, rank, activations = groups.grid, groups.rank, layout.activation_traffic
    own_chunks = layout.chunks_of_stage(groups.coordinates.pipeline)
    # of one micro-batch
    tensor_bytes = sum(activations.tensor_bytes(chunk) for chunk in own_chunks)
    sent = activations.pipeline_sent(grid, rank, layout.model_chunks)
    tensor_ranks = grid.tensor_group(rank)
    traffic.add("tensor", ring_sent(grid, rank, tensor_ranks, tensor_bytes * micro_batches))
    traffic.add("pipeline", sent * micro_batches)
