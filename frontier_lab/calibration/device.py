"""Measure matrix products, memory bandwidth, attention and other kernels on this rank's device."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from frontier_llm.collectives.kernel_choice import choose_kernels
from frontier_llm.collectives.slots import Slots
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.device.accumulate import accumulate_product
from frontier_llm.geometry.formats import Format
from frontier_llm.model.transformer import gelu_tanh
from frontier_llm.planner.compute import BACKWARD_FLOPS, tile_flops

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STREAM_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Elements of the fp32 tensor with which bandwidth is measured, by type of device."""
ATTENTION = {"cpu": (1, 4, 512, 64), "cuda": (1, 32, 4096, 128)}
"""Shape of queries, keys and values by type of device: samples, heads, tokens, head width."""
LAYER = {"cpu": (512, 512), "cuda": (4096, 4096)}
"""Tokens and hidden size of the element-wise kernels, by type of device."""
WEIGHT = {"cpu": (256, 384), "cuda": (4096, 4096)}
"""Tokens and hidden size of a weight gradient, by type of device."""
COLD_BYTES = {"cpu": 1 << 26, "cuda": 0}
"""Total size of the operands that a measured product cycles through, by type of device. On a CPU it
is larger than the caches of a core. The products of a GPU are larger than its caches."""
QUANTISED = {"cpu": 1 << 21, "cuda": 1 << 26}
"""Elements of a buffer that is quantised, by type of device."""
FFN = 4
"""Width of the activation function, in hidden sizes."""
SECONDS = 0.04
"""Minimum duration of one measurement, in seconds."""
REPETITIONS = 5
"""Number of measurements. Their median counts, as a step takes about as long as the median step:
the fastest measurement may have run at a higher clock speed, and other programs slow down some."""
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


@dataclass(frozen=True)
class KernelFigures:
    """Measured speeds in one number format."""

    precision: str
    attention_tflops: float
    """Speed of causal attention in TFLOP/s. The masked half of the scores is not counted."""
    attention_backward_tflops: float
    """The same for its backward pass, with 2.5 times the operations."""
    weight_gradient_ratio: float
    """Seconds of a weight gradient and its addition to fp32 sums, relative to the forward pass."""
    elementwise_bytes_per_second: float
    """Bytes per second of a layer's element-wise kernels, forward and backward pass together. The
    bytes are those of fully fused kernels (planner/block.py)."""
    quantise_bytes_per_second: float
    """Bytes per second of the kernels that quantise and dequantise a message."""


@dataclass(frozen=True)
class DeviceFigures:
    """Measured speeds of one device."""

    name: str
    memory_bytes_per_second: float
    kernels: tuple[KernelFigures, ...]
    kernel_seconds: float
    """Seconds from the start of a tiny kernel to the start of the next one."""


def measure_device(precisions: tuple[str, ...]) -> DeviceFigures:
    """Measure the device of this rank in some number formats."""
    tiny, stream = (torch.zeros(n, device=device()) for n in (1, STREAM_ELEMENTS[device().type]))
    # an addition in place reads and writes each element once
    streamed = 2 * stream.nbytes / seconds_of(lambda: stream.add_(1.0))
    kernels = tuple(_measure_kernels(precision) for precision in precisions)
    return DeviceFigures(device_name(), streamed, kernels, seconds_of(lambda: tiny.add_(1.0)))


def used_bytes() -> float:
    """Return the memory in use: of all programs on the GPU, or the peak of this process on a CPU.

    The allocator of a GPU first gives back what it holds unused.
    """
    if device().type == "cpu":
        return float(Accelerator(device(), "cpu", "cpu").peak_bytes())
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return float(total - free)


def _measure_kernels(precision: str) -> KernelFigures:
    dtype = DTYPES[precision]
    samples, heads, tokens, width = ATTENTION[device().type]
    flops = 2 * samples * heads * tokens * tokens * width
    forward, backward = _attention_seconds(dtype)
    return KernelFigures(
        precision,
        1e-12 * flops / forward,
        1e-12 * BACKWARD_FLOPS * flops / backward,
        _weight_gradient_ratio(dtype),
        _elementwise_bytes_per_second(dtype),
        _quantise_bytes_per_second(dtype),
    )


def _attention_seconds(dtype: torch.dtype) -> tuple[float, float]:
    shape = ATTENTION[device().type]
    query, key, value = (_random(shape, dtype).requires_grad_() for _ in range(3))

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    return _passes(attend, (query, key, value))


def _weight_gradient_ratio(dtype: torch.dtype) -> float:
    """Measure the gradients of many weights, because a step does not use the same sums again soon.

    The other side of the ratio is the forward product with as many weights.
    """
    tokens, hidden = WEIGHT[device().type]
    shape = (FFN * hidden, hidden)
    count = max(1, COLD_BYTES[device().type] // (4 * FFN * hidden * hidden))
    inputs, gradient = _random((tokens, hidden), dtype), _random((tokens, FFN * hidden), dtype)
    weights = cycle([_random(shape, dtype) for _ in range(count)])
    sums = cycle([torch.zeros(shape, device=device()) for _ in range(count)])
    forward = seconds_of(lambda: F.linear(inputs, next(weights)))
    backward = seconds_of(lambda: accumulate_product(next(sums), gradient.t(), inputs, add=True))
    return backward / forward


def _elementwise_bytes_per_second(dtype: torch.dtype) -> float:
    """Measure the element-wise kernels of a layer: two norms, two additions and GELU."""
    tokens, hidden = LAYER[device().type]
    inputs = _random((tokens, hidden), dtype).requires_grad_()
    weight, bias = (_random((hidden,), dtype).requires_grad_() for _ in range(2))
    wide = _random((tokens, FFN * hidden), dtype).requires_grad_()
    normed = _passes(lambda: F.layer_norm(inputs, (hidden,), weight, bias), (inputs, weight, bias))
    activated = _passes(lambda: gelu_tanh(wide), (wide,))
    added = seconds_of(lambda: inputs.detach() + inputs.detach())
    seconds = 2 * (sum(normed) + added) + sum(activated)
    # a norm and an activation function read and write a tensor, an addition reads two
    elements = tokens * hidden * (2 * (2 + 3) + 2 * FFN)
    # the backward pass of an addition only passes its gradient on
    return 3 * elements * dtype.itemsize / seconds


def _quantise_bytes_per_second(dtype: torch.dtype) -> float:
    """Measure the kernels of messages in 8 bits, of buffers that are not in a cache.

    On a CPU their arithmetic takes longer than the memory traffic.
    """
    kernels, message_format = choose_kernels("auto", device()), Format("int8")
    elements = QUANTISED[device().type]
    size = message_format.slot_bytes(elements, 1, elements)
    pairs = []
    for _ in range(max(1, COLD_BYTES[device().type] // (4 * elements))):
        data = torch.zeros(1, size, dtype=torch.uint8, device=device())
        slots = Slots(data, message_format, elements, elements, torch.bfloat16)
        pairs.append((_random((1, elements), dtype), slots))
    buffers = cycle(pairs)
    seconds = seconds_of(lambda: kernels.quantise(*next(buffers)))
    seconds += seconds_of(lambda: kernels.dequantise(*next(buffers)[::-1]))
    return 2 * elements * (dtype.itemsize + message_format.element_bytes) / seconds


def _passes(run: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> tuple[float, float]:
    output = run()
    gradient = torch.ones_like(output)

    def backward() -> None:
        torch.autograd.grad(output, inputs, gradient, retain_graph=True)

    return seconds_of(run), seconds_of(backward)


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device()).to(dtype)


def device() -> torch.device:
    """Return the GPU of this rank, or the CPU of a machine without a GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """Return the name of the device."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"a CPU with {threads} {'thread' if threads == 1 else 'threads'} per rank"


def seconds_of(action: Callable[[], object]) -> float:
    """Return the seconds of one call of `action`. A first call, as warm-up, is not measured.

    If there are several ranks, all measure the same action at the same time, as in training: ranks
    share the memory of the machine, and on a CPU its caches and its clock speed.
    """
    action()
    finish()
    if dist.is_initialized():
        dist.barrier()
    return median(_measure(action) for _ in range(REPETITIONS))


def finish() -> None:
    """Wait until the device has finished all work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _measure(action: Callable[[], object]) -> float:
    """Return the average seconds of a call over calls that take at least `SECONDS` together."""
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS or not calls:
        action()
        calls += 1
        if calls % 16 == 0:  # a GPU only queues the calls, which takes less time than running them
            finish()
    finish()
    return (time.perf_counter() - start) / calls


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
    samples = [_measure_product(shape, DTYPES[precision]) for shape in SHAPES[device().type]]
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


def _measure_product(shape: tuple[int, int, int], dtype: torch.dtype) -> Sample:
    """Measure a product with operands that are not in a cache, as in a step.

    Calls take turns with enough pairs of operands to fill the caches.
    """
    m, k, n = shape
    pairs = COLD_BYTES[device().type] // (dtype.itemsize * (m * k + k * n))
    shapes = ((m, k), (k, n))
    operands = cycle([[_random(shape, dtype) for shape in shapes] for _ in range(max(1, pairs))])
    return Sample(m, k, n, seconds_of(lambda: torch.matmul(*next(operands))))
