"""Measure memory bandwidth, attention and the start of a kernel."""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from frontier_llm.calibration.products import DTYPES
from frontier_llm.calibration.timing import device, device_name, seconds_of

STREAM_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}
ATTENTION = {"cpu": (1, 4, 512, 64), "cuda": (1, 32, 4096, 128)}
"""Shape of queries, keys and values: samples, heads, tokens, head width."""
ATTENTION_FORMATS = {"cpu": "fp32", "cuda": "bf16"}


@dataclass(frozen=True)
class DeviceFigures:
    """Speeds of one device."""

    name: str
    memory_bytes_per_second: float
    attention_format: str
    attention_tflops: float
    """Counts only the half of the products that is not masked."""
    kernel_seconds: float


def measure_device() -> DeviceFigures:
    """Measure this machine's device."""
    name = ATTENTION_FORMATS[device().type]
    return DeviceFigures(device_name(), _stream(), name, _attention(DTYPES[name]), _kernel())


def _stream() -> float:
    """Return bytes per second of an in-place addition, which reads and writes each element."""
    tensor = torch.zeros(STREAM_ELEMENTS[device().type], device=device())
    return 2 * 4 * tensor.numel() / seconds_of(lambda: tensor.add_(1.0))


def _attention(dtype: torch.dtype) -> float:
    samples, heads, tokens, width = ATTENTION[device().type]
    query, key, value = (
        torch.randn(samples, heads, tokens, width, device=device(), dtype=dtype) for _ in range(3)
    )
    seconds = seconds_of(lambda: scaled_dot_product_attention(query, key, value, is_causal=True))
    return 2e-12 * samples * heads * tokens * tokens * width / seconds


def _kernel() -> float:
    tensor = torch.zeros(1, device=device())
    return seconds_of(lambda: tensor.add_(1.0))
