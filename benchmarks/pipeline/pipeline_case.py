"""Define a case of bench_pipeline: its settings, its contenders, and what a rank measures."""

from dataclasses import dataclass

from frontier_llm.cli.compose import compose
from frontier_llm.config import RunConfig, decode


@dataclass(frozen=True)
class Contender:
    """A pipeline schedule, and the program that runs it."""

    schedule: str
    """Value of `parallel.schedule`."""
    chunks: int
    """Model chunks per stage."""
    waits: bool = False
    """Whether weight gradients wait, although the schedule itself does not split backward
    passes."""
    is_megatron: bool = False
    """Whether megatron-core runs it, and not frontier_llm."""


CONTENDERS = {
    "megatron-1f1b": Contender("1f1b", 1, is_megatron=True),
    "1f1b": Contender("1f1b", 1),
    "1f1b-waiting": Contender("1f1b", 1, waits=True),
    "zb_h1": Contender("zb_h1", 1),
    "megatron-interleaved": Contender("interleaved", 2, is_megatron=True),
    "interleaved": Contender("interleaved", 2),
    "interleaved-waiting": Contender("interleaved", 2, waits=True),
    "zb_v": Contender("zb_v", 2),
    "v_half": Contender("v_half", 2),
}
"""All contenders, in the order of their turns."""
BASELINE = "1f1b"
"""The contender with which all others are compared."""
MEGATRON = {1: "megatron-1f1b", 2: "megatron-interleaved"}
"""megatron's contender, by model chunks per stage."""


@dataclass(frozen=True)
class Sizes:
    """Dimensions of the GPT that every contender trains."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int


@dataclass(frozen=True)
class Case:
    """Settings under which the contenders are compared."""

    ranks: int
    """One for each pipeline stage."""
    micro_batches: int
    """Micro-batches per step, of one sample each."""
    sizes: Sizes
    waiting: int
    """Limit of waiting weight gradients for the contenders that let them wait."""
    rounds: int
    """Timed steps of each contender."""
    recompute: str = "none"
    """Value of `recompute`."""

    @property
    def contenders(self) -> dict[str, Contender]:
        """The contenders. Several model chunks need a micro-batch for each stage."""
        return {
            name: contender
            for name, contender in CONTENDERS.items()
            if contender.chunks == 1 or self.micro_batches >= self.ranks
        }

    def config(self, contender: Contender) -> RunConfig:
        """Return the configuration of a contender."""
        sizes = self.sizes
        overrides = [
            "model=gpt_tiny",
            "model.tied=false",
            f"model.layers={sizes.layers}",
            f"model.hidden={sizes.hidden}",
            f"model.heads={sizes.heads}",
            f"model.vocabulary={sizes.vocabulary}",
            f"data.vocabulary={sizes.vocabulary}",
            f"data.sequence_length={sizes.sequence}",
            "data.micro_batch=1",
            f"data.global_batch={self.micro_batches}",
            "precision=fp32",
            f"recompute={self.recompute}",
            f"parallel.pipeline={self.ranks}",
            f"parallel.schedule={contender.schedule}",
            f"parallel.chunks={contender.chunks}",
            f"parallel.waiting_weights={self.waiting if contender.waits else 0}",
        ]
        config: RunConfig = decode(compose(overrides))
        return config


@dataclass(frozen=True)
class TimedStep:
    """One step on one rank."""

    seconds: float
    """Duration of the step."""
    actions: tuple[tuple[float, float], ...]
    """Start and end of each action of the schedule in seconds since a moment that is the same on
    all ranks; empty if megatron runs the schedule."""


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured of one contender."""

    steps: tuple[TimedStep, ...]
    """The timed steps."""
    losses: tuple[float, ...]
    """Losses of all steps."""
    grad_norms: tuple[float, ...]
    """Norms of the gradient in all steps."""
    peak_bytes: int
    """Peak memory of the tensors that are allocated in the passes of a step."""
