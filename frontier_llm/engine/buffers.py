"""Persistent buffers of a module in checkpoints, such as the running means of batch norms.

Files hold fp32 numbers, so the bytes of a buffer of any dtype are stored as if they were numbers.
"""

from collections.abc import Iterator

import torch
from torch import nn

from frontier_llm.protocols import ParameterRecord, Placement, StateShard

PREFIX = "buffer:"
"""Begin of the names of buffers in a checkpoint."""


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name of each buffer that is part of the state dict and is not empty, and itself."""
    seen = set[int]()
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            is_kept = buffer is not None and name not in child._non_persistent_buffers_set
            if is_kept and buffer.numel() and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


def shard_of(name: str, buffer: torch.Tensor) -> StateShard:
    """Return a copy of a buffer's bytes as a state for a checkpoint."""
    data = buffer.detach().reshape(-1).view(torch.uint8)
    words = torch.zeros(-(-data.numel() // 4), dtype=torch.float32, device=buffer.device)
    words.view(torch.uint8)[: data.numel()].copy_(data)
    shape = tuple(words.shape)
    record = ParameterRecord(
        parameter=nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False),
        unit="",
        placements=(Placement(f"{PREFIX}{name}", shape, (0,), (0,), shape),),
        group="norms",
        counted=True,
        tensor_partial=False,
        tied=False,
    )
    return StateShard(record, 0, {"bytes": words})


def write_back(shard: StateShard, buffer: torch.Tensor) -> None:
    """Set a buffer to bytes that were read from a checkpoint."""
    data = shard.tensors["bytes"].view(torch.uint8)[: buffer.nbytes]
    with torch.no_grad():
        buffer.copy_(data.view(buffer.dtype).view(buffer.shape))
