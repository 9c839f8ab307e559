"""Measure matrix products of many shapes and fit the constants of the planner's formula to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

import torch

from frontier_llm.calibration.device import COLD_BYTES, DTYPES, device, seconds_of
from frontier_llm.planner.compute import tile_flops

SHAPES = {
    "cpu": (
        (256, 256, 256),
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
"""Measured shapes by type of device: rows, inner size and columns of a product."""
HALF_SIZES = tuple(range(0, 1001, 2))
"""Values of `MatrixCurve.half_size` that the fit tries."""


class Sample(NamedTuple):
    """The measured seconds of a product of [rows, inner] and [inner, columns]."""

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
    """The measurements in one number format, and the curve that was fitted to them."""

    precision: str
    tflops: float
    half_size: float
    """Fitted size below which products are slow (`MatrixCurve`); 0 with `processors`."""
    samples: tuple[Sample, ...]
    processors: int | None = None
    """Processors that compute tiles; None on a device without them."""

    def curve(self, m: int, k: int, n: int) -> float:
        """Return the TFLOP/s that the fit gives for a product of [m, k] and [k, n]."""
        work = _work(m, k, n, self.half_size, self.processors)
        return self.tflops * 2e-12 * m * k * n / work


def measure_products(precision: str) -> ProductFigures:
    """Measure all shapes in one number format and fit the speed of products to them."""
    samples = [_measure(shape, DTYPES[precision]) for shape in SHAPES[device().type]]
    processors = None
    if device().type != "cpu":
        processors = int(torch.cuda.get_device_properties(device()).multi_processor_count)
    return fitted(precision, samples, processors)


def fitted(
    precision: str, samples: Sequence[Sample], processors: int | None = None
) -> ProductFigures:
    """Return samples with the speed and half size of the least sum of squared relative errors.

    The half sizes are tried one by one; with `processors` it is 0. For each of them, the best speed
    is sum((x/y)^2) / sum(x/y) over all samples. Here x is the time at a speed of 1 TFLOP/s, and y
    is the measured time.
    """
    found = []
    for half_size in HALF_SIZES if processors is None else (0,):
        ratios = [_work(m, k, n, half_size, processors) / seconds for m, k, n, seconds in samples]
        tflops = sum(ratio * ratio for ratio in ratios) / sum(ratios)
        found.append((sum((ratio / tflops - 1) ** 2 for ratio in ratios), half_size, tflops))
    _, half_size, tflops = min(found)
    return ProductFigures(precision, tflops, float(half_size), tuple(samples), processors)


def _work(m: int, k: int, n: int, half_size: float, processors: int | None) -> float:
    """Return the seconds of a product at a speed of 1 TFLOP/s."""
    if processors is not None:
        return 1e-12 * processors * tile_flops(m, k, n, 1, processors)
    return 2e-12 * (m * k * n + half_size * (m * k + k * n + m * n))


def _measure(shape: tuple[int, int, int], dtype: torch.dtype) -> Sample:
    """Measure a product with operands that are not in a cache, as in a step.

    Calls take turns with enough pairs of operands to fill the caches.
    """
    m, k, n = shape
    pairs = COLD_BYTES[device().type] // (dtype.itemsize * (m * k + k * n))
    shapes = ((m, k), (k, n))
    operands = cycle([[_random(shape, dtype) for shape in shapes] for _ in range(max(1, pairs))])
    return Sample(m, k, n, seconds_of(lambda: torch.matmul(*next(operands))))


def _random(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=device()).to(dtype)
