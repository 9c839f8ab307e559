"""Adam's moments in fewer bits, for second copies on the nodes' disks (`checkpoint.moments`).

The elements of a stored range are divided into blocks of 256. A block takes a fixed number of words
of 4 bytes, so that a reader finds the blocks of any element:

    bf16   128 words: each element rounded to bf16
    int8    65 words: the scale of the block in fp32, then a code of 8 bits per element

The codes are those of AdamW with moments in 8 bits (collectives/block_codes.py). The last block of
a range is padded with zeros.
"""

from dataclasses import dataclass

import torch

from frontier_llm.checkpoint.manifest import Moments
from frontier_llm.collectives.block_codes import BlockCodes
from frontier_llm.geometry.state_memory import MOMENT_BLOCK_ELEMENTS as BLOCK
from frontier_llm.geometry.state_memory import MOMENT_BLOCK_WORDS

MOMENTS = ("exp_avg", "exp_avg_sq")
"""States that are reduced: the first and the second moment."""


def words(elements: int, moments: Moments) -> int:
    """Return the number of words of 4 bytes that a range of elements takes."""
    return -(-elements // BLOCK) * MOMENT_BLOCK_WORDS[moments]


def encode(values: torch.Tensor, moments: Moments, *, signed: bool) -> torch.Tensor:
    """Return [words] fp32, whose bits are the codes of values; first moments are signed."""
    if {"bf16": True, "int8": False}[moments]:
        padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK))
        return padded.bfloat16().view(torch.float32)
    codes = BlockCodes(values.numel(), values.device, signed=signed)
    codes.encode(values)
    return torch.cat([codes.scales.view(torch.uint8), codes.codes], 1).flatten().view(torch.float32)


def decode(encoded: torch.Tensor, moments: Moments, *, signed: bool) -> torch.Tensor:
    """Return [elements] fp32: the values of whole blocks, padding included, from [words] fp32."""
    if moments == "bf16":
        return encoded.view(torch.bfloat16).float()
    blocks = encoded.view(torch.uint8).view(-1, 4 * MOMENT_BLOCK_WORDS["int8"])
    codes = BlockCodes(BLOCK * len(blocks), encoded.device, signed=signed)
    codes.scales.copy_(blocks[:, :4].contiguous().view(torch.float32))
    codes.codes.copy_(blocks[:, 4:])
    return codes.decode()


@dataclass(frozen=True, eq=False)
class ReducedWords:
    """Words of the reduced values of a range, which are encoded when a checkpoint reads them."""

    values: torch.Tensor
    """[elements] fp32, the moments of the range. They must not change while words are read."""
    moments: Moments
    signed: bool
    start: int
    stop: int

    dtype = torch.float32

    @classmethod
    def of(cls, values: torch.Tensor, moments: Moments, state: str) -> "ReducedWords":
        """Return all words of the values of a state."""
        signed = state == "exp_avg"
        return cls(values, moments, signed, 0, words(values.numel(), moments))

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self.values.device

    def numel(self) -> int:
        """Return the number of words."""
        return self.stop - self.start

    def data_ptr(self) -> int:
        """Return the address of the values."""
        return self.values.data_ptr()

    def __getitem__(self, part: slice) -> "ReducedWords":
        start, stop, _ = part.indices(self.numel())
        first = self.start
        return ReducedWords(self.values, self.moments, self.signed, first + start, first + stop)

    def decode(self) -> torch.Tensor:
        """Return [words] fp32: the words, encoded from the values."""
        size = MOMENT_BLOCK_WORDS[self.moments]
        first, last = self.start // size, -(-self.stop // size)
        values = self.values[first * BLOCK : last * BLOCK]
        encoded = encode(values, self.moments, signed=self.signed)
        return encoded[self.start - first * size : self.stop - first * size]
