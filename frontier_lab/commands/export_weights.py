"""Export the weights of a checkpoint to one plain safetensors file (`inspect --export`).

The file begins with the length of its header as an 8-byte little-endian integer. The header is JSON
and gives the dtype, shape and byte range of each tensor. The tensors follow without gaps.
Source: the description of the format, https://github.com/huggingface/safetensors.
"""

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from frontier_lab.stored_weights import check_headers, read_tensor
from frontier_llm.atomic_files import new_file, sync
from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.errors import CheckpointError, file_failure

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""torch's type for each accepted value of `dtype`."""
_NAMES = {"fp32": "F32", "bf16": "BF16"}
"""Name of each type in a safetensors header."""
_ALIGNMENT = 8
"""Alignment of the first tensor in bytes, so that a reader can map the file into memory."""
_WRITE_ELEMENTS = 1 << 22
"""Number of elements that are converted and written at once (16 MiB in fp32)."""


def export(checkpoint: Checkpoint, path: Path, dtype: str, advance: Callable[[int], None]) -> None:
    """Write all weights under their names in the model, one tensor after another.

    The file gets its final name when it is complete and on disk. The export needs memory for the
    largest tensor in fp32, and for two chunks of a checkpoint file (16 MiB each by default).
    `advance` gets the number of elements after each write. bf16 is rounded to nearest.
    """
    check_headers(checkpoint)
    try:
        with new_file(path) as file:
            file.write(_header(checkpoint, dtype))
            for name in checkpoint.manifest.weights:
                weights = read_tensor(checkpoint, name, states=("master",))["master"]
                _write(file, weights, DTYPES[dtype], advance)
        sync(path.parent)
    except OSError as error:
        raise CheckpointError(file_failure(path, "written", error)) from None


def _header(checkpoint: Checkpoint, dtype: str) -> bytes:
    """Return the length of the header and the header, padded with blanks."""
    manifest = checkpoint.manifest
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "step": str(manifest.step)}}
    position = 0
    for name, tensor in manifest.weights.items():
        end = position + prod(tensor.shape) * DTYPES[dtype].itemsize
        entries[name] = {
            "dtype": _NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [position, end],
        }  # fmt: skip
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write(
    file: BinaryIO, weights: torch.Tensor, dtype: torch.dtype, advance: Callable[[int], None]
) -> None:
    for part in weights.flatten().split(_WRITE_ELEMENTS):
        file.write(part.to(dtype).view(torch.uint8).numpy().data)
        advance(part.numel())
