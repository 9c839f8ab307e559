"""Enumerate the space of a search: cuts of the model, and sharding factors of its states."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from frontier_llm.config.planner import Sizes
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.elastic import divisors
from frontier_llm.geometry.partition import Factors

DEFAULT_CHUNKS = (1, 2, 4, 8)
"""Model chunks per stage that are tried if `planner.chunks` is not set."""
LARGEST_MICRO_BATCH = 64
"""Largest micro-batch in samples that is tried if `planner.micro_batch` is not set."""


@dataclass(frozen=True)
class Cut:
    """How a model is divided over ranks and computed: a layout without its sharding factors."""

    tensor: int
    """Tensor parallel ranks."""
    pipeline: int
    """Pipeline stages."""
    chunks: int
    """Model chunks (virtual stages) per stage."""
    micro_batch: int
    """Samples per micro-batch."""
    recompute: str
    """`none`, `selective` or `full`."""

    def __str__(self) -> str:
        return (
            f"TP {self.tensor} PP {self.pipeline}x{self.chunks} micro {self.micro_batch} "
            f"{self.recompute}"
        )

    def apply(self, config: RunConfig) -> RunConfig:
        """Return a configuration with this cut.

        Sequence parallelism is used if the tensor ranks divide the sequence length. It sends no
        more bytes than tensor parallelism alone, and saves time and memory.
        """
        sequence_parallel = self.tensor > 1 and config.data.sequence_length % self.tensor == 0
        parallel = config.parallel.model_copy(
            update={
                "tensor": self.tensor,
                "pipeline": self.pipeline,
                "chunks": self.chunks,
                "sequence": sequence_parallel,
                "layers_per_stage": None,
            }
        )
        data = config.data.model_copy(update={"micro_batch": self.micro_batch})
        return config.model_copy(
            update={"parallel": parallel, "data": data, "recompute": self.recompute}
        )


def cuts(config: RunConfig, ranks: int, ranks_per_node: int) -> Iterator[Cut]:
    """Yield every cut that the search examines, including cuts that cannot be resolved.

    Tensor ranks stay inside a node. Without a pipeline there is one model chunk.
    """
    planner = config.planner
    for tensor in _allowed(planner.tensor, divisors(min(ranks, ranks_per_node))):
        if ranks % tensor:
            continue
        stage_counts = [p for p in divisors(ranks // tensor) if p <= config.model.layers]
        for pipeline in _allowed(planner.pipeline, stage_counts):
            chunks = _allowed(planner.chunks, DEFAULT_CHUNKS if pipeline > 1 else (1,))
            micro_batches = _allowed(planner.micro_batch, _micro_batches(config))
            recomputes = planner.recompute or ("none", "selective", "full")
            for values in product(chunks, micro_batches, recomputes):
                yield Cut(tensor, pipeline, *values)


def legal_factors(config: RunConfig, data: int) -> tuple[Factors, ...]:
    """Return every legal set of sharding factors for `data` data ranks, in ascending order."""
    planner = config.planner
    return _legal_factors(data, planner.params, planner.grads, planner.optimizer)


@lru_cache
def _legal_factors(data: int, *restrictions: Sizes | None) -> tuple[Factors, ...]:
    allowed = [[d for d in divisors(data) if sizes is None or d in sizes] for sizes in restrictions]
    return tuple(
        Factors(params, grads, optimizer, data)
        for params, grads, optimizer in product(*allowed)
        if grads % params == 0 and optimizer % grads == 0
    )


def _micro_batches(config: RunConfig) -> list[int]:
    """Return the powers of two up to the largest micro-batch that is tried."""
    largest = min(LARGEST_MICRO_BATCH, config.data.global_batch)
    return [2**power for power in range(largest.bit_length())]


def _allowed(configured: Sequence[int] | None, default: Sequence[int]) -> Sequence[int]:
    return default if configured is None else configured
