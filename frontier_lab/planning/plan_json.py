"""Predictions as plain values, for `frontier-llm plan --json`."""

from typing import Any

from frontier_lab.planning.run_cost import run_cost
from frontier_lab.planning.search import Found, Point
from frontier_llm.planner.estimate import Estimate


def layout_json(layout: Estimate) -> dict[str, Any]:
    """Return the prediction for a layout as plain values."""
    config, parallel = layout.candidate.config, layout.candidate.config.parallel
    return {
        "layout": {
            "nodes": layout.candidate.grid.nodes,
            "ranks": layout.candidate.grid.size,
            "tensor": parallel.tensor,
            "pipeline": parallel.pipeline,
            "context": layout.candidate.grid.context,
            "chunks": parallel.chunks,
            "schedule": layout.candidate.layout.schedule_name,
            "waiting_weights": layout.candidate.layout.waiting_weights,
            "layers_per_stage": parallel.layers_per_stage,
            "data": layout.candidate.grid.data,
            "sequence": parallel.sequence,
            "micro_batch": config.data.micro_batch,
            "micro_batches": layout.candidate.layout.micro_batches,
            "global_batch": config.data.global_batch,
            "recompute": config.recompute,
            "collectives": config.collectives.name,
            "grads_format": config.collectives.grads_format,
        },
        "factors": layout.candidate.factors.by_key,
        "step_seconds": layout.time.seconds,
        "tokens_per_second": layout.tokens_per_second,
        "model_tflops_per_device": layout.model_tflops,
        "hardware_tflops_per_device": layout.hardware_tflops,
        "mfu": layout.mfu,
        "hfu": layout.hfu,
        "step_seconds_by_part": layout.time.parts,
        "bubble_fraction": layout.time.bubble_fraction,
        "exposed_communication_seconds": layout.time.exposed,
        "checkpoint_stall_seconds": layout.time.parts["checkpoint"],
        "peak_memory_bytes": {
            "fullest_stage": layout.peak.stage,
            "total": layout.peak.total,
            "stages": [
                {
                    "stage": memory.stage,
                    "total": memory.total,
                    "by_category": memory.by_category,
                }
                for memory in layout.memory
            ],
        },
        "host_bytes": layout.peak.host_bytes,
        "refused_reason": layout.refused,
    }


def point_json(point: Point) -> dict[str, Any]:
    """Return the best layouts on one number of nodes as plain values."""
    return {
        "nodes": point.nodes,
        "strong": layout_json(point.strong) if point.strong else None,
        "weak": layout_json(point.weak) if point.weak else None,
        "strong_efficiency": point.strong_efficiency,
        "weak_efficiency": point.weak_efficiency,
    }


def found_json(found: Found) -> dict[str, Any]:
    """Return the result of a search as plain values."""
    candidates = []
    for layout in found.best:
        tokens = layout.candidate.config.planner.tokens
        cost = {} if tokens is None else {"cost": run_cost(layout, tokens).to_json()}
        candidates.append(layout_json(layout) | cost)
    return {
        "candidates": candidates,
        "refused": dict(sorted(found.refused.items())),
        "refused_examples": dict(sorted(found.examples.items())),
        "examined": found.examined,
        "timed": found.timed,
    }
