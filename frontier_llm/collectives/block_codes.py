"""Optimizer moments in 8 bits per element: blocks of codes with a scale each.

A value is its block's largest magnitude times a number of a table of 256 numbers. The numbers are
dense near 0: between 10^-z-1 and 10^-z lie 2^(7-z) of them (2^(6-z) with a sign). Zero and one are
in the table, so that a decoded block is encoded to the same codes again.
Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv:2110.02861, sections
2.1 and 2.2).
"""

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
def _nearest(device: torch.device, *, signed: bool) -> torch.Tensor:
    """Return [65536] uint8: the code nearest to a number, by the first 16 bits of its fp32 bits.

    Numbers with the same 16 bits differ by less than half of the distance of two numbers of the
    table, so a number of the table is always found again.
    """
    bits = (torch.arange(65536, dtype=torch.int64) << 16) + 2**15  # the middle of each range
    centres = torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32)
    centres = centres.nan_to_num(0.0, 1.0, -1.0).clamp(-1, 1)
    numbers = table(torch.device("cpu"), signed=signed)
    codes = torch.bucketize(centres, (numbers[1:] + numbers[:-1]) / 2)
    if not signed:
        codes = torch.where(centres > 0, codes.clamp(min=1), codes)
    codes[0] = int(torch.searchsorted(numbers, 0.0))  # zero itself
    return codes.to(torch.uint8).to(device)


class BlockCodes:
    """The values of one interval, in 8 bits per element; at first zeros.

    Attributes:
        codes: [blocks, 256] uint8, indices into the table.
        scales: [blocks, 1] fp32, the largest magnitude of each block.
    """

    def __init__(self, elements: int, device: torch.device, *, signed: bool) -> None:
        self._elements, self._signed = elements, signed
        self._staged: torch.Tensor | None = None
        blocks = -(-elements // BLOCK_ELEMENTS)
        zero = int(_nearest(torch.device("cpu"), signed=signed)[0])
        self.codes = torch.full((blocks, BLOCK_ELEMENTS), zero, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(blocks, 1, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def decode(self, part: slice | None = None) -> torch.Tensor:
        """Return [elements] fp32: the values of a part of the interval; None = all of it."""
        start, stop, _ = (part or slice(None)).indices(self._elements)
        blocks = slice(start // BLOCK_ELEMENTS, -(-stop // BLOCK_ELEMENTS))
        numbers = table(self.codes.device, signed=self._signed)
        values = (numbers[self.codes[blocks].int()] * self.scales[blocks]).flatten()
        offset = start - blocks.start * BLOCK_ELEMENTS
        return values[offset : offset + stop - start]

    def encode(self, values: torch.Tensor) -> None:
        """Replace all values by [elements] fp32, rounded to a nearest number of the table.

        A value without a sign that is not 0 becomes at least the smallest number above 0, so that
        no update is divided by 0.
        """
        padding = -self._elements % BLOCK_ELEMENTS
        blocks = torch.nn.functional.pad(values, (0, padding)) if padding else values
        blocks = blocks.view(-1, BLOCK_ELEMENTS)
        torch.linalg.vector_norm(blocks, torch.inf, dim=1, keepdim=True, out=self.scales)
        shares = blocks / self.scales.clamp(min=torch.finfo(torch.float32).tiny)
        first_bits = shares.view(torch.int32) >> 16 & 0xFFFF
        self.codes.copy_(_nearest(values.device, signed=self._signed)[first_bits])

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
