"""Choice of the block quantisation kernels: the fastest that reproduce the reference's bits."""

from dataclasses import replace

import torch

from frontier_llm.collectives import native_blockwise
from frontier_llm.collectives.blockwise import BlockKernels
from frontier_llm.collectives.residual import Residual
from frontier_llm.collectives.slots import Slots
from frontier_llm.collectives.torch_blockwise import TorchKernels
from frontier_llm.geometry.formats import Format

# formats in which kernels are compared with the reference
_TESTED_FORMATS = (
    Format("int8", block_elements=64, scale_bytes=4),
    Format("int4", block_elements=64, scale_bytes=2),
    Format("int4", block_elements=64, scale_bytes=2, is_stochastic=True),
    Format("int4", block_elements=64, scale_bytes=2, rotation_elements=32),
)


def choose_kernels(wanted: str, device: torch.device) -> BlockKernels:
    """Choose the kernels for a device.

    All implementations produce the same bits, so ranks may choose differently. The setting
    `torch` chooses the reference (blockwise.py). Other values choose C on a CPU and Triton on a
    GPU, or the reference if these do not work.
    """
    if wanted == "torch":
        return TorchKernels()
    try:
        kernels = native_blockwise.load() if device.type == "cpu" else _triton()
        verify(kernels, device)
    except Exception as error:  # any failure of a compiler or driver: fall back
        return replace(TorchKernels(), reason=" ".join(str(error).split()) or repr(error))
    return kernels


def verify(kernels: BlockKernels, device: torch.device) -> None:
    """Compare the results of kernels with the reference, on three parts of three and a half blocks.

    The first part is quantised, the second in part, the third is not. A bit that differs raises
    ValueError.
    """
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(3, 3 * 64 + 33, generator=generator).to(device)
    for fmt in _TESTED_FORMATS:
        results = [_all_results(one, parts, fmt) for one in (kernels, TorchKernels())]
        for result, expected in zip(*results, strict=True):
            if not torch.equal(result, expected):
                raise ValueError(f"{kernels.name} kernels differ from torch in {fmt.name}")


def _all_results(kernels: BlockKernels, parts: torch.Tensor, fmt: Format) -> list[torch.Tensor]:
    count, elements = parts.shape
    border = elements + 2 * 64 + 5
    size = fmt.slot_bytes(elements, count, border)
    data = torch.zeros(count, size, dtype=torch.uint8, device=parts.device)
    slots = Slots(data, fmt, elements, border, torch.bfloat16)
    residual = Residual.zeros(count, elements, parts.device, 64, decay=0.5)
    kernels.quantise(parts, slots, residual, seed=7)
    kernels.quantise(parts, slots, residual, seed=7, base=parts.roll(1, 0))
    out, total = torch.empty_like(parts), torch.ones_like(parts[0])
    kernels.dequantise(slots, out)
    first = replace(slots, data=data[:1].expand(3, -1))
    kernels.add_up(first, total, skip=1)
    assert residual.scales is not None
    return [data, residual.values, residual.scales, out, total]


def _triton() -> BlockKernels:
    from frontier_llm.collectives.triton_blockwise import TritonKernels

    return TritonKernels()
