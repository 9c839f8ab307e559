"""How much of its peaks a device reaches: the constants that the planner's times rest on."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section


class MatrixCurve(Section):
    """Speed of matrix products by shape.

    A product of [m, k] and [k, n] takes 2 (mnk + half_size (mn + nk + km)) / tflops: large ones
    run at `tflops`, and a cube whose side is three times `half_size` at half of it.
    """

    tflops: float = Field(gt=0)
    """What very large products reach, TFLOP/s."""
    half_size: float = Field(ge=0)
    """Rows that are lost at each face of a product."""


class CalibrationConfig(Section):
    """Measured or fitted; `tools/calibrate.py` measures, `tools/validate_planner.py` fits."""

    products: dict[Literal["fp32", "bf16", "fp16"], MatrixCurve]
    """By compute format; absent = the planner gives no times in this format."""
    attention_share: float = Field(gt=0)
    """Speed of a fused attention kernel, as a share of `tflops`, masked half not counted."""
    memory_share: float = Field(gt=0, le=1)
    """Share of the memory bandwidth that element-wise kernels reach."""
    kernel_us: float = Field(ge=0)
    """Time between the starts of two kernels that do nothing."""
    hidden_share: float = Field(ge=0, le=1)
    """Share of communication that costs no time while there is computation beside it."""
    reserved_gib: float = Field(ge=0)
    """Memory that the runtime, its libraries and communicators take before anything is allocated
    (on a CPU: the interpreter and its libraries)."""
    slack_share: float = Field(ge=0)
    """What the allocator holds beyond what is asked, as a share of what comes and goes."""
    source: str
    """Where these figures come from."""
