"""Choice of the block quantisation kernels: the fastest that reproduce the reference's bits."""

from dataclasses import replace

import torch

from frontier_llm.collectives.blockwise import BlockKernels, TorchKernels
from frontier_llm.geometry.formats import Format

# formats in which kernels are compared with the reference
_TESTED_FORMATS = (
    Format("int8", block_elements=64, scale_bytes=4),
    Format("int4", block_elements=64, scale_bytes=2),
    Format("int4", block_elements=64, scale_bytes=2, is_stochastic=True),
)


def choose_kernels(wanted: str, device: torch.device) -> BlockKernels:
    """Choose the kernels for a device.

    All implementations produce the same bits, so ranks may choose differently.

    Args:
        wanted: the setting `kernels`. `torch` chooses the reference (blockwise.py). Other values
            choose C on a CPU and Triton on a GPU, or the reference if these do not work.
        device: where the kernels run and are verified.
    """
    if wanted == "torch":
        return TorchKernels()
    try:
        kernels = _native() if device.type == "cpu" else _triton()
        verify(kernels, device)
    except Exception as error:  # any failure of a compiler or driver: fall back
        return replace(TorchKernels(), reason=" ".join(str(error).split()) or repr(error))
    return kernels


def verify(kernels: BlockKernels, device: torch.device) -> None:
    """Compare the results of kernels with the reference, on three blocks and part of a fourth.

    Raises:
        ValueError: a bit differs.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3 * 64 + 5, generator=generator).to(device)
    for fmt in _TESTED_FORMATS:
        results = [
            _all_results(implementation, values, fmt)
            for implementation in (kernels, TorchKernels())
        ]
        for result, expected in zip(*results, strict=True):
            if not torch.equal(result, expected):
                raise ValueError(f"{kernels.name} kernels differ from torch in {fmt.name}")


def _all_results(kernels: BlockKernels, values: torch.Tensor, fmt: Format) -> list[torch.Tensor]:
    """Return everything that the three kernels write for some values."""
    slot = fmt.slot(values.numel(), values.numel())
    blocks = -(-values.numel() // fmt.block_elements)
    dtype = torch.float32 if fmt.scale_bytes == 4 else torch.bfloat16
    scales = torch.zeros(blocks, dtype=dtype, device=values.device)
    packed = torch.zeros(slot.stop - slot.values, dtype=torch.uint8, device=values.device)
    residual = torch.zeros(values.numel(), dtype=torch.bfloat16, device=values.device)
    kernels.quantise(values, fmt, scales, packed, residual, seed=7)
    out, total = torch.empty_like(values), torch.ones_like(values)
    kernels.dequantise(scales, packed, fmt, out)
    kernels.add_up(scales.expand(3, -1), packed.expand(3, -1), fmt, total, skip=1)
    return [scales, packed, residual, out, total]


def _native() -> BlockKernels:
    from frontier_llm.collectives import native_blockwise

    return native_blockwise.load()


def _triton() -> BlockKernels:
    from frontier_llm.collectives.triton_blockwise import TritonKernels

    return TritonKernels()
