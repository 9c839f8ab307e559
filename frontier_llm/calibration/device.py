"""Measure memory bandwidth, the speed of attention and the time to start a kernel."""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from frontier_llm.calibration.products import DTYPES
from frontier_llm.calibration.timing import device, device_name, seconds_of

STREAM_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Elements of the fp32 tensor with which bandwidth is measured, by type of device."""
ATTENTION = {"cpu": (1, 4, 512, 64), "cuda": (1, 32, 4096, 128)}
"""Shape of queries, keys and values by type of device: samples, heads, tokens, head width."""
ATTENTION_FORMATS = {"cpu": "fp32", "cuda": "bf16"}
"""Number format in which attention is measured, by type of device."""


@dataclass(frozen=True)
class DeviceFigures:
    """Measured speeds of one device."""

    name: str
    memory_bytes_per_second: float
    attention_format: str
    attention_tflops: float
    """Speed of causal attention in TFLOP/s. The masked half of the scores is not counted."""
    kernel_seconds: float
    """Seconds from the start of a tiny kernel to the start of the next one."""


def measure_device() -> DeviceFigures:
    """Measure the device of this machine."""
    attention_format = ATTENTION_FORMATS[device().type]
    return DeviceFigures(
        name=device_name(),
        memory_bytes_per_second=_memory_bytes_per_second(),
        attention_format=attention_format,
        attention_tflops=_attention_tflops(DTYPES[attention_format]),
        kernel_seconds=_kernel_seconds(),
    )


def _memory_bytes_per_second() -> float:
    """Measure an in-place addition, which reads and writes each element once."""
    tensor = torch.zeros(STREAM_ELEMENTS[device().type], device=device())
    return 2 * 4 * tensor.numel() / seconds_of(lambda: tensor.add_(1.0))


def _attention_tflops(dtype: torch.dtype) -> float:
    samples, heads, tokens, width = ATTENTION[device().type]
    query, key, value = (
        torch.randn(samples, heads, tokens, width, device=device(), dtype=dtype) for _ in range(3)
    )
    seconds = seconds_of(lambda: scaled_dot_product_attention(query, key, value, is_causal=True))
    return 2e-12 * samples * heads * tokens * tokens * width / seconds


def _kernel_seconds() -> float:
    tensor = torch.zeros(1, device=device())
    return seconds_of(lambda: tensor.add_(1.0))
