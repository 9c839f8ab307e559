"""Predict peak memory, seconds per step and speed of a candidate layout."""

from collections.abc import Sequence
from dataclasses import dataclass

from frontier_llm.geometry.flops import step_hardware_flops, step_model_flops
from frontier_llm.planner.block import Activations
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.layout_time import LayoutTime
from frontier_llm.planner.memory import StageMemory, stages_memory
from frontier_llm.planner.step_time import StepTime, step_time
from frontier_llm.units import GIB, format_bytes

FREE_SHARE = 0.05
"""Share of the memory that should stay free, because allocators slow a run down in nearly full
memory."""
FREE_COST = 0.01
"""Share of a step that may be lost to leave that memory free."""
FULL_COST = 0.1
"""Share of a step by which a full device is judged slower, with nothing left for what is not
planned. Runs in nearly full memory were measured 10% to 30% slower than predicted."""


@dataclass(frozen=True)
class Estimate:
    """The prediction for a layout."""

    candidate: Candidate
    memory: tuple[StageMemory, ...]
    """Peak memory of a rank of each stage."""
    time: StepTime

    @property
    def peak(self) -> StageMemory:
        """Predicted memory of a rank of the fullest stage."""
        return max(self.memory, key=lambda memory: memory.total)

    @property
    def refused(self) -> str | None:
        """The reason why the layout does not fit in memory; None = it fits."""
        budget = budget_bytes(self.candidate)
        if self.peak.total <= budget:
            return None
        return (
            f"memory: stage {self.peak.stage} needs {format_bytes(self.peak.total)} of "
            f"{format_bytes(budget)}, most for {self.peak.largest}"
        )

    @property
    def judged_seconds(self) -> float:
        """Seconds of a step, more if the memory is nearly full: layouts are ranked by them."""
        return judged_seconds(self.candidate, self.time.seconds, self.peak.total)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        samples = self.candidate.config.data.global_batch
        return samples * self.candidate.layout.lengths.total / self.time.seconds

    @property
    def tokens_per_device(self) -> float:
        """Tokens per second of one device."""
        return self.tokens_per_second / self.candidate.grid.size

    @property
    def model_tflops(self) -> float:
        """TFLOP/s per device, counting the operations of the model without recomputation."""
        config, layout = self.candidate.config, self.candidate.layout
        sizes = layout.lengths, config.data.global_batch
        return self._per_device(step_model_flops(config.model, *sizes, layout.read_share))

    @property
    def hardware_tflops(self) -> float:
        """TFLOP/s per device, counting recomputed operations too."""
        config, layout = self.candidate.config, self.candidate.layout
        sizes = layout.lengths, config.data.global_batch
        flops = step_hardware_flops(config.model, *sizes, config.recompute, layout.read_share)
        return self._per_device(flops)

    @property
    def mfu(self) -> float | None:
        """`model_tflops` as a share of the peak of the device; None = the peak is unknown."""
        return self._share(self.model_tflops)

    @property
    def hfu(self) -> float | None:
        """`hardware_tflops` as a share of the peak of the device; None = the peak is unknown."""
        return self._share(self.hardware_tflops)

    def _per_device(self, flops: float) -> float:
        return flops / self.time.seconds / self.candidate.grid.size / 1e12

    def _share(self, tflops: float) -> float | None:
        device = self.candidate.config.cluster.device
        peak = device.peak_tflops.get(self.candidate.layout.precision)  # type: ignore[call-overload]
        return tflops / peak if peak else None


def estimate(
    candidate: Candidate,
    layout: LayoutTime | None = None,
    activations: Sequence[Activations] | None = None,
) -> Estimate:
    """Predict memory and time; the layout's times and all `activations` may be known already."""
    layout = layout or LayoutTime(candidate)
    memory = stages_memory(candidate, activations)
    return Estimate(candidate, tuple(memory), step_time(candidate, layout))


def budget_bytes(candidate: Candidate) -> int:
    """Return the bytes of device memory that a layout may use: `planner.memory_share` of all."""
    config = candidate.config
    return int(config.planner.memory_share * config.cluster.device.memory_gib * GIB)


def judged_seconds(candidate: Candidate, seconds: float, peak: int) -> float:
    """Return the seconds of a step by which a layout is ranked, given its peak memory in bytes.

    They grow by up to FULL_COST while the last FREE_SHARE of the device's memory fills.
    """
    filled = peak / (candidate.config.cluster.device.memory_gib * GIB)
    return seconds * (1 + FULL_COST * max(0.0, filled - 1 + FREE_SHARE) / FREE_SHARE)
