"""Residuals: the rounding errors of quantised messages, kept for the next message.

Let x be a value that is to be sent and e its residual. A kernel quantises h = x + e, and a receiver
decodes d. With the decay b, the next residual is

    e' = b e + (1 - b) (h - d)

in fp32, with 0 in place of a value that is not finite. With b = 0 it is the rounding error itself.
The residual is stored in bf16, or in int8 with a scale for each block of the message. The blocks
are rounded to nearest, with scales as in 8-bit messages (blockwise.py).

It follows that e' - e = (1 - b) (x - d). The errors x - d of all messages since the residual was 0
therefore add up to e' / (1 - b), where e' is the residual after the last of these messages, apart
from the rounding of the stored residuals. In int8 these roundings add up over many messages, so a
caller should zero the residual from time to time (`reset`).

Sources: Seide et al., 1-Bit Stochastic Gradient Descent (Interspeech 2014), for b = 0; LoCo
(arXiv:2407.04480) for a moving average in 8 bits that is zeroed regularly.
"""

from dataclasses import dataclass, replace

import torch

RESIDUAL_DTYPE = torch.bfloat16
"""Dtype of residuals without scales."""


@dataclass(frozen=True)
class Residual:
    """The rounding errors of a buffer that is sent in several parts, such as one to each rank."""

    values: torch.Tensor
    """[parts, m] bf16, or int8 if there are scales."""
    scales: torch.Tensor | None = None
    """[parts, blocks] fp32 or bf16: one scale per block of a part, counted as in its message."""
    decay: float = 0.0
    """Weight b of the old residual in the new one, at least 0 and less than 1."""

    @classmethod
    def zeros(
        cls,
        parts: int,
        elements: int,
        device: torch.device,
        block_elements: int | None = None,
        scale_dtype: torch.dtype = torch.float32,
        decay: float = 0.0,
    ) -> "Residual":
        """Allocate zeros: in int8 with scales, or in bf16 if messages have no `block_elements`."""
        if block_elements is None:
            values = torch.zeros(parts, elements, dtype=RESIDUAL_DTYPE, device=device)
            return cls(values, None, decay)
        blocks = -(-elements // block_elements)
        return cls(
            torch.zeros(parts, elements, dtype=torch.int8, device=device),
            torch.zeros(parts, blocks, dtype=scale_dtype, device=device),
            decay,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the values and of the scales."""
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def weights(self) -> tuple[float, float]:
        """Weights of the old residual and of the new rounding error."""
        return self.decay, 1.0 - self.decay

    def reset(self) -> None:
        """Discard the rounding errors."""
        self.values.zero_()
        if self.scales is not None:
            self.scales.zero_()

    def only(self, part: int) -> "Residual":
        """Return a view of one part, as a residual of a buffer that consists of this part."""
        scales = None if self.scales is None else self.scales[part : part + 1]
        return replace(self, values=self.values[part : part + 1], scales=scales)

    def start_of(self, part: int, elements: int, block_elements: int) -> "Residual":
        """Return a view of the first elements of a part: values [elements], scales [blocks]."""
        blocks = -(-elements // block_elements)
        scales = None if self.scales is None else self.scales[part, :blocks]
        return replace(self, values=self.values[part, :elements], scales=scales)

    def assert_fits(self, parts: torch.Tensor, block_elements: int) -> None:
        """Check shapes and dtypes against a buffer, [parts, m], and the blocks of its messages."""
        assert self.values.shape == parts.shape
        if self.scales is None:
            assert self.values.dtype == RESIDUAL_DTYPE
            return
        assert self.values.dtype == torch.int8
        assert self.scales.shape == (len(parts), -(-parts.shape[1] // block_elements))
