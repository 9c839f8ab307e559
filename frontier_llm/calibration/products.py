"""Measure matrix products of many shapes and fit the curve of config/calibration.py to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from frontier_llm.calibration.timing import device, seconds_of

SHAPES = {
    "cpu": (
        (256, 64, 192),
        (256, 256, 1024),
        (512, 256, 256),
        (512, 1024, 256),
        (1024, 1024, 1024),
    ),
    "cuda": (
        (2048, 1024, 1024),
        (2048, 2304, 6912),
        (2048, 4096, 4096),
        (4096, 4096, 11008),
        (4096, 12288, 3072),
        (8192, 8192, 8192),
        (2048, 25600, 12800),
    ),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HALF_SIZES = tuple(range(0, 1001, 2))


class Sample(NamedTuple):
    """The measurement of one shape."""

    rows: int
    inner: int
    columns: int
    seconds: float

    @property
    def tflops(self) -> float:
        """Speed in TFLOP/s."""
        return 2e-12 * self.rows * self.inner * self.columns / self.seconds


@dataclass(frozen=True)
class ProductFigures:
    """The fitted curve of one format."""

    precision: str
    tflops: float
    half_size: float
    samples: tuple[Sample, ...]

    def curve(self, m: int, k: int, n: int) -> float:
        """Return the TFLOP/s of the curve for a product of [m, k] and [k, n]."""
        return self.tflops / (1 + self.half_size * (1 / m + 1 / k + 1 / n))


def measure_products(precision: str) -> ProductFigures:
    """Measure all shapes in one format and fit the curve."""
    samples = [_measure(shape, DTYPES[precision]) for shape in SHAPES[device().type]]
    tflops, half_size = fit_curve(samples)
    return ProductFigures(precision, tflops, half_size, tuple(samples))


def fit_curve(samples: Sequence[Sample]) -> tuple[float, float]:
    """Return the speed and the half size with the smallest sum of squared relative errors.

    The half sizes are tried one by one. For each, the best speed is sum((x/y)^2) / sum(x/y), where
    x is the time of the curve at speed 1 and y the measured time.
    """
    best: tuple[float, float, float] | None = None
    for half_size in HALF_SIZES:
        ratios = [
            2e-12 * (m * k * n + half_size * (m * k + k * n + m * n)) / seconds
            for m, k, n, seconds in samples
        ]
        tflops = sum(r * r for r in ratios) / sum(ratios)
        loss = sum((r / tflops - 1) ** 2 for r in ratios)
        if best is None or loss < best[0]:
            best = (loss, tflops, float(half_size))
    assert best is not None
    return best[1], best[2]


def _measure(shape: tuple[int, int, int], dtype: torch.dtype) -> Sample:
    m, k, n = shape
    left = torch.randn(m, k, device=device()).to(dtype)
    right = torch.randn(k, n, device=device()).to(dtype)
    return Sample(m, k, n, seconds_of(lambda: torch.matmul(left, right)))
