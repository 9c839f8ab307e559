"""Enumerate the cuts of a model that a search examines."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from frontier_llm.config.planner import Recompute
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.elastic import divisors
from frontier_llm.planner.space import Order, context_sizes, orders

DEFAULT_CHUNKS = (1, 2, 4, 8)
"""Model chunks per stage that are tried if `planner.chunks` is not set."""
LARGEST_MICRO_BATCH = 64
"""Largest micro-batch in samples that is tried if `planner.micro_batch` is not set."""


@dataclass(frozen=True)
class Cut:
    """How a model is divided over ranks and computed: a layout without its sharding factors."""

    tensor: int
    pipeline: int
    context: int
    """Data ranks that divide the tokens of a sample."""
    chunks: int
    """Model chunks (virtual stages) per stage."""
    order: Order
    micro_batch: int
    """Samples per micro-batch."""
    recompute: str
    """`none`, `selective` or `full`."""
    layers_per_stage: tuple[int, ...] | None = None
    """Layers of each model chunk; None = an even split."""

    def __str__(self) -> str:
        layers = f" layers {list(self.layers_per_stage)}" if self.layers_per_stage else ""
        context = f"CP {self.context} " if self.context > 1 else ""
        return (
            f"TP {self.tensor} {context}PP {self.pipeline}x{self.chunks} {self.order} "
            f"micro {self.micro_batch} {self.recompute}{layers}"
        )

    def apply(self, config: RunConfig) -> RunConfig:
        """Return a configuration with this cut.

        Sequence parallelism is used if the tensor ranks divide the sequence length, or each of the
        two ranges of a context rank. It sends no more bytes than tensor parallelism alone, and
        saves time and memory.
        """
        multiple = self.tensor * (2 * self.context if self.context > 1 else 1)
        sequence_parallel = self.tensor > 1 and config.data.sequence_length % multiple == 0
        parallel = {
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "context": self.context,
            "chunks": self.chunks,
            "schedule": self.order.schedule,
            "waiting_weights": self.order.waiting_weights,
            "sequence": sequence_parallel,
            "layers_per_stage": self.layers_per_stage,
        }
        return config.model_copy(
            update={
                "parallel": config.parallel.model_copy(update=parallel),
                "data": config.data.model_copy(update={"micro_batch": self.micro_batch}),
                "recompute": self.recompute,
            }
        )


def cuts(config: RunConfig, ranks: int, ranks_per_node: int) -> Iterator[Cut]:
    """Yield every cut with an even split, including cuts that cannot be resolved.

    Tensor ranks stay inside a node. Without a pipeline there is one model chunk.
    """
    planner = config.planner
    modes: tuple[Recompute, ...] = ("none", "selective", "full")
    if planner.engine.fused_attention:
        # it keeps no scores: `selective` would take longer and save no memory
        modes = ("none", "full")
    largest = min(LARGEST_MICRO_BATCH, config.data.global_batch)
    powers = [2**power for power in range(largest.bit_length())]
    micro_batches = _allowed(planner.micro_batch, powers)
    for tensor in _allowed(planner.tensor, divisors(min(ranks, ranks_per_node))):
        if ranks % tensor:
            continue
        stage_counts = [p for p in divisors(ranks // tensor) if p <= config.model.layers]
        for pipeline in _allowed(planner.pipeline, stage_counts):
            contexts = _allowed(planner.context, context_sizes(config, ranks // tensor // pipeline))
            chunk_counts = _allowed(planner.chunks, DEFAULT_CHUNKS if pipeline > 1 else (1,))
            for context, chunks in product(contexts, chunk_counts):
                found = orders(config, pipeline, chunks, planner.schedule)
                for values in product(found, micro_batches, planner.recompute or modes):
                    yield Cut(tensor, pipeline, context, chunks, *values)


def _allowed(configured: Sequence[int] | None, default: Sequence[int]) -> Sequence[int]:
    return default if configured is None else configured
