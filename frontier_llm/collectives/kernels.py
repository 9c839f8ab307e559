"""Which implementation of block quantisation a rank uses: the fastest one that proves itself."""

from dataclasses import replace

import torch

from frontier_llm.collectives.blockwise import BlockKernels, TorchKernels
from frontier_llm.geometry.formats import Format

_PROVED = (
    Format("int8", block_elements=64, scale_bytes=4),
    Format("int4", block_elements=64, scale_bytes=2),
    Format("int4", block_elements=64, scale_bytes=2, is_stochastic=True),
)


def resolve(wanted: str, device: torch.device) -> BlockKernels:
    """Choose the kernels for a device.

    All implementations make the same bits, so ranks may differ in their choice.

    Args:
        wanted: `torch` for the reference; else C on a CPU and Triton on a GPU, where they work.
        device: where they run, and where the proof is made.
    """
    if wanted == "torch":
        return TorchKernels()
    try:
        kernels = _native() if device.type == "cpu" else _triton()
        prove(kernels, device)
    except Exception as error:  # whatever a compiler or a driver says, there is another way
        return replace(TorchKernels(), reason=" ".join(str(error).split()) or repr(error))
    return kernels


def prove(kernels: BlockKernels, device: torch.device) -> None:
    """Compare with the reference on a few blocks, the last one short.

    Raises:
        ValueError: a bit differs.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3 * 64 + 5, generator=generator).to(device)
    for code in _PROVED:
        answers = [_round_trip(one, values, code) for one in (kernels, TorchKernels())]
        for mine, expected in zip(*answers, strict=True):
            if not torch.equal(mine, expected):
                raise ValueError(f"{kernels.name} kernels differ from torch in {code.name}")


def _round_trip(kernels: BlockKernels, values: torch.Tensor, code: Format) -> list[torch.Tensor]:
    slot = code.slot(values.numel(), values.numel())
    blocks = -(-values.numel() // code.block_elements)
    dtype = torch.float32 if code.scale_bytes == 4 else torch.bfloat16
    scales = torch.zeros(blocks, dtype=dtype, device=values.device)
    packed = torch.zeros(slot.stop - slot.values, dtype=torch.uint8, device=values.device)
    residual = torch.zeros(values.numel(), dtype=torch.bfloat16, device=values.device)
    kernels.quantise(values, code, scales, packed, residual, seed=7)
    out, total = torch.empty_like(values), torch.ones_like(values)
    kernels.dequantise(scales, packed, code, out)
    kernels.add_up(scales.expand(3, -1), packed.expand(3, -1), code, total, left_out=1)
    return [scales, packed, residual, out, total]


def _native() -> BlockKernels:
    from frontier_llm.collectives import native_blockwise

    return native_blockwise.load()


def _triton() -> BlockKernels:
    from frontier_llm.collectives.triton_blockwise import TritonKernels

    return TritonKernels()
