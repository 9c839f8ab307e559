"""One candidate, judged: does it fit, how long is a step, what share of the peak is that."""

from dataclasses import dataclass
from typing import Any

from frontier_llm.geometry.flops import step_hardware_flops, step_model_flops
from frontier_llm.geometry.lengths import run_lengths
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.engine import OURS, Engine
from frontier_llm.planner.layout_time import LayoutTime
from frontier_llm.planner.memory import StageMemory, stages_memory
from frontier_llm.planner.step_time import StepTime, step_time
from frontier_llm.units import GIB, format_bytes


@dataclass(frozen=True)
class Estimate:
    """What the planner says of a layout."""

    candidate: Candidate
    memory: tuple[StageMemory, ...]
    """Of every stage."""
    time: StepTime

    @property
    def peak(self) -> StageMemory:
        """The fullest stage."""
        return max(self.memory, key=lambda memory: memory.total)

    @property
    def refused(self) -> str | None:
        """Why the layout cannot run; None = it can."""
        budget = budget_bytes(self.candidate)
        if self.peak.total <= budget:
            return None
        return (
            f"memory: stage {self.peak.stage} needs {format_bytes(self.peak.total)} of "
            f"{format_bytes(budget)}, most for {self.peak.largest}"
        )

    @property
    def tokens_per_second(self) -> float:
        """Of the whole job."""
        config = self.candidate.config
        return config.data.global_batch * run_lengths(config).total / self.time.seconds

    @property
    def model_tflops(self) -> float:
        """TFLOP/s of a device that the mathematics needs."""
        data = self.candidate.config.data
        model = self.candidate.config.model
        return self._per_device(step_model_flops(model, data.sequence_length, data.global_batch))

    @property
    def hardware_tflops(self) -> float:
        """TFLOP/s of a device, recomputation counted."""
        config = self.candidate.config
        flops = step_hardware_flops(
            config.model, config.data.sequence_length, config.data.global_batch, config.recompute
        )
        return self._per_device(flops)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs' share of the peak; None where the peak is unknown."""
        return self._share(self.model_tflops)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs' share of the peak; None where the peak is unknown."""
        return self._share(self.hardware_tflops)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        config, factors = self.candidate.config, self.candidate.factors
        parallel = config.parallel
        return {
            "layout": {
                "nodes": -(-self.candidate.grid.size // self.candidate.grid.ranks_per_node),
                "ranks": self.candidate.grid.size,
                "tensor": parallel.tensor,
                "pipeline": parallel.pipeline,
                "chunks": parallel.chunks,
                "data": self.candidate.grid.data,
                "sequence": parallel.sequence,
                "micro_batch": config.data.micro_batch,
                "micro_batches": self.candidate.micro_batches,
                "global_batch": config.data.global_batch,
                "recompute": config.recompute,
                "collectives": config.collectives.name,
                "grads_format": config.collectives.grads_format,
            },
            "factors": {
                "params": factors.params,
                "grads": factors.grads,
                "optimizer": factors.optimizer,
            },
            "step_seconds": self.time.seconds,
            "tokens_per_second": self.tokens_per_second,
            "model_tflops_per_device": self.model_tflops,
            "hardware_tflops_per_device": self.hardware_tflops,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "step_seconds_by_part": self.time.parts,
            "bubble_fraction": self.time.bubble_fraction,
            "exposed_communication_seconds": self.time.exposed,
            "checkpoint_stall_seconds": self.time.parts["checkpoint"],
            "peak_memory_bytes": {
                "fullest_stage": self.peak.stage,
                "total": self.peak.total,
                "stages": [
                    {"stage": m.stage, "total": m.total, "by_category": m.by_category}
                    for m in self.memory
                ],
            },
            "host_bytes": self.peak.host_bytes,
            "refused_reason": self.refused,
        }

    def _per_device(self, flops: float) -> float:
        return flops / self.time.seconds / self.candidate.grid.size / 1e12

    def _share(self, tflops: float) -> float | None:
        device = self.candidate.config.cluster.device
        peak = device.peak_tflops.get(self.candidate.precision)  # type: ignore[call-overload]
        return tflops / peak if peak else None


def estimate(
    candidate: Candidate, engine: Engine = OURS, layout: LayoutTime | None = None
) -> Estimate:
    """Judge a candidate.

    Args:
        candidate: the layout.
        engine: the program that runs it.
        layout: what is known of it without its factors.

    Raises:
        ConfigError: the cluster's speed in this precision is not known.
    """
    layout = layout or LayoutTime(candidate, engine)
    return Estimate(candidate, tuple(stages_memory(candidate)), step_time(candidate, layout))


def budget_bytes(candidate: Candidate) -> int:
    """Return the memory of a device that a layout may fill."""
    config = candidate.config
    return int(config.planner.memory_share * config.cluster.device.memory_gib * GIB)
