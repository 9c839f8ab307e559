"""Optimizer moments in 8 bits per element: blocks of codes with a scale each.

A value is its block's largest magnitude times a number of a table of 256 numbers. The numbers are
dense near 0: between 10^-z-1 and 10^-z lie 2^(7-z) of them (2^(6-z) with a sign). Zero and one are
in the table, so that a decoded block is encoded to the same codes again.
Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv:2110.02861, sections
2.1 and 2.2).
"""

from collections.abc import Iterable
from functools import lru_cache

import torch

from frontier_llm.geometry.state_memory import MOMENT_BLOCK_ELEMENTS as BLOCK_ELEMENTS


@lru_cache
def table(device: torch.device, *, signed: bool) -> torch.Tensor:
    """Return [256] fp32, ascending: the numbers that codes stand for; the largest is 1."""
    bits = 6 if signed else 7
    positive = [
        10.0**-zeros * (0.1 + 0.9 * (index + 1) / 2 ** (bits - zeros))
        for zeros in range(bits + 1)
        for index in range(2 ** (bits - zeros))
    ]
    numbers = [0.0, *positive, *(-number for number in positive if signed)]
    numbers += [0.0] * (256 - len(numbers))
    return torch.tensor(sorted(numbers), dtype=torch.float32, device=device)


@lru_cache
def _borders(device: torch.device, *, signed: bool) -> torch.Tensor:
    """Return [255] fp32: the middle between each number of the table and the next one."""
    numbers = table(device, signed=signed)
    return (numbers[1:] + numbers[:-1]) / 2


class BlockCodes:
    """The values of one interval, in 8 bits per element.

    Attributes:
        codes: [elements] uint8, indices into the table.
        scales: [blocks] fp32, the largest magnitude of each block.
    """

    def __init__(self, elements: int, device: torch.device, *, signed: bool) -> None:
        """Begin with zeros."""
        self._signed = signed
        self._staged: torch.Tensor | None = None
        zero = int(torch.searchsorted(table(torch.device("cpu"), signed=signed), 0.0))
        self.codes = torch.full((elements,), zero, dtype=torch.uint8, device=device)
        blocks = -(-elements // BLOCK_ELEMENTS)
        self.scales = torch.zeros(blocks, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def decode(self, part: slice | None = None) -> torch.Tensor:
        """Return [elements] fp32: the values of a part of the interval; None = all of it."""
        start, stop, _ = (part or slice(None)).indices(len(self.codes))
        numbers = table(self.codes.device, signed=self._signed)
        values = numbers[self.codes[start:stop].int()]
        first, last = start // BLOCK_ELEMENTS, -(-stop // BLOCK_ELEMENTS)
        scales = self.scales[first:last].repeat_interleave(BLOCK_ELEMENTS)
        offset = start - first * BLOCK_ELEMENTS
        return values * scales[offset : offset + stop - start]

    def encode(self, values: torch.Tensor) -> None:
        """Replace all values by [elements] fp32, rounded to the nearest number of the table.

        A value without a sign that is not 0 becomes at least the smallest number above 0.
        """
        padding = -len(values) % BLOCK_ELEMENTS
        blocks = torch.nn.functional.pad(values, (0, padding)).view(-1, BLOCK_ELEMENTS)
        self.scales.copy_(blocks.abs().amax(dim=1))
        scales = self.scales.clamp(min=torch.finfo(torch.float32).tiny)
        shares = (blocks / scales[:, None]).flatten()[: len(values)]
        codes = torch.bucketize(shares, _borders(values.device, signed=self._signed))
        if not self._signed:
            codes = torch.where(values > 0, codes.clamp(min=1), codes)
        self.codes.copy_(codes)

    def staged(self) -> torch.Tensor:
        """Return [elements] fp32, which the caller overwrites; `commit` encodes it."""
        if self._staged is None:
            self._staged = self.decode()
        return self._staged

    def commit(self) -> None:
        """Encode what the caller has written to `staged`, and free it."""
        if self._staged is not None:
            self.encode(self._staged)
            self._staged = None


class EncodedPart:
    """A part of the values of `BlockCodes`, which is decoded when a checkpoint reads it."""

    dtype = torch.float32

    def __init__(self, codes: BlockCodes, start: int, stop: int) -> None:
        self._codes, self._start, self._stop = codes, start, stop

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self._codes.codes.device

    def numel(self) -> int:
        """Return the number of elements."""
        return self._stop - self._start

    def data_ptr(self) -> int:
        """Return the address of the first code."""
        return self._codes.codes.data_ptr() + self._start

    def __getitem__(self, part: slice) -> "EncodedPart":
        start, stop, _ = part.indices(self.numel())
        return EncodedPart(self._codes, self._start + start, self._start + stop)

    def decode(self) -> torch.Tensor:
        """Return [elements] fp32: the values."""
        return self._codes.decode(slice(self._start, self._stop))


def total_bytes(moments: Iterable[BlockCodes]) -> int:
    """Return the bytes of codes and scales."""
    return sum(codes.nbytes for codes in moments)
