"""Warn of heads whose rows a GPU reads slowly."""

from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.compute import ALIGNED_BYTES


def head_warning(candidate: Candidate) -> str | None:
    """Return a warning about heads whose rows the device reads slowly; None if there is no need."""
    model, step = candidate.config.model, ALIGNED_BYTES // candidate.layout.compute_bytes
    width = next((w for w in (model.head_dim, model.encoder.head_dim) if w % step), None)
    if width is None:
        return None
    return (
        f"warning: heads of {width} elements slow attention down on GPUs, which wants multiples of "
        f"{step}: choose model.heads and model.hidden so that a head has {width // step * step} or "
        f"{-(-width // step) * step}"
    )
