"""The share of its peak speeds that a device reaches: constants of the planner's predictions."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section


class MatrixCurve(Section):
    """The speed of matrix products by shape.

    A product of [m, k] and [k, n] takes 2 (mnk + half_size (mn + nk + km)) / tflops. Large products
    run at `tflops`; a product with m = n = k = 3 half_size runs at half of it.
    """

    tflops: float = Field(gt=0)
    """Speed of very large products, TFLOP/s."""
    half_size: float = Field(ge=0)
    """Size below which a product is slow, in rows: see the formula of this section."""


class CalibrationConfig(Section):
    """Constants that `frontier-llm calibrate` measures or benchmarks/planner_accuracy.py fits."""

    products: dict[Literal["fp32", "bf16", "fp16"], MatrixCurve]
    """Speed of matrix products by compute format; without a format the planner predicts no times in
    it."""
    attention_share: float = Field(gt=0)
    """Speed of a fused attention kernel as a share of `tflops`; the masked half is not counted."""
    memory_share: float = Field(gt=0, le=1)
    """Share of the memory bandwidth that element-wise kernels reach."""
    kernel_us: float = Field(ge=0)
    """Time between the starts of two empty kernels, microseconds."""
    hidden_share: float = Field(ge=0, le=1)
    """Share of the communication time that overlap with computation hides."""
    reserved_gib: float = Field(ge=0)
    """Memory that the runtime, its libraries and communicators take before the first allocation
    (on a CPU: the interpreter and its libraries), GiB."""
    slack_share: float = Field(ge=0)
    """Memory that the allocator holds beyond what is requested, as a share of the temporary
    tensors."""
    source: str
    """Source of these figures."""
