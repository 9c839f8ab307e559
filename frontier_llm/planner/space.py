"""The space that a search examines: cuts of the model, and factors of its states."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from frontier_llm.config.planner import Sizes
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.elastic import divisors
from frontier_llm.geometry.partition import Factors

DEFAULT_CHUNKS = (1, 2, 4, 8)
LARGEST_MICRO_BATCH = 64


@dataclass(frozen=True)
class Cut:
    """How a model is cut and computed: a layout without its factors."""

    tensor: int
    pipeline: int
    chunks: int
    micro_batch: int
    recompute: str

    def __str__(self) -> str:
        return (
            f"TP {self.tensor} PP {self.pipeline}x{self.chunks} micro {self.micro_batch} "
            f"{self.recompute}"
        )

    def apply(self, config: RunConfig) -> RunConfig:
        """Return a configuration with this cut.

        Sequence parallelism is used wherever the sequence can be divided over the tensor ranks,
        because it sends no more bytes and saves both time and memory.
        """
        splits = self.tensor > 1 and config.data.sequence_length % self.tensor == 0
        parallel = config.parallel.model_copy(
            update={
                "tensor": self.tensor,
                "pipeline": self.pipeline,
                "chunks": self.chunks,
                "sequence": splits,
                "layers_per_stage": None,
            }
        )
        data = config.data.model_copy(update={"micro_batch": self.micro_batch})
        return config.model_copy(
            update={"parallel": parallel, "data": data, "recompute": self.recompute}
        )


def cuts(config: RunConfig, ranks: int, ranks_per_node: int) -> Iterator[Cut]:
    """Yield every cut that the search examines, including illegal ones.

    Tensor ranks stay inside a node. Without a pipeline there is one model chunk.
    """
    planner = config.planner
    for tensor in _chosen(planner.tensor, divisors(min(ranks, ranks_per_node))):
        if ranks % tensor:
            continue
        stages = [p for p in divisors(ranks // tensor) if p <= config.model.layers]
        for pipeline in _chosen(planner.pipeline, stages):
            chunks = _chosen(planner.chunks, DEFAULT_CHUNKS if pipeline > 1 else (1,))
            micro_batches = _chosen(planner.micro_batch, _micro_batches(config))
            recomputes = planner.recompute or ("none", "selective", "full")
            for values in product(chunks, micro_batches, recomputes):
                yield Cut(tensor, pipeline, *values)


def legal_factors(config: RunConfig, data: int) -> tuple[Factors, ...]:
    """Return every legal set of factors, the coarsest first."""
    planner = config.planner
    return _legal_factors(data, planner.params, planner.grads, planner.optimizer)


@lru_cache
def _legal_factors(data: int, *wanted: Sizes | None) -> tuple[Factors, ...]:
    legal = divisors(data)
    allowed = [[d for d in legal if sizes is None or d in sizes] for sizes in wanted]
    return tuple(
        Factors(p, g, o, data) for p, g, o in product(*allowed) if g % p == 0 and o % g == 0
    )


def _micro_batches(config: RunConfig) -> list[int]:
    """Return powers of two up to the largest possible micro-batch."""
    most = min(LARGEST_MICRO_BATCH, config.data.global_batch)
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def _chosen(wanted: Sequence[int] | None, default: Sequence[int]) -> Sequence[int]:
    return default if wanted is None else wanted
