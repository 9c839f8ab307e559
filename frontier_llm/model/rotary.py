"""Rotate queries and keys by their positions, in one function that can be compiled by itself.

Rotary positions: Su et al., RoFormer (arXiv:2104.09864, section 3.2.2), with the pairs of GPT-NeoX:
element i of a head is rotated with element i + r / 2, where r elements of a head are rotated.

megatron's function gives the same numbers, but it copies queries and keys once more, and computes
the cosines and sines for both.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


class RotarySelfAttention(SelfAttention):
    """megatron's self-attention, in which `rotate` rotates queries and keys.

    Attributes:
        compiles_functions: whether `rotate` is compiled by itself.
    """

    def __init__(self, *arguments: Any, compiles_functions: bool, **options: Any) -> None:
        """Build the module; all arguments but `compiles_functions` are megatron's."""
        super().__init__(*arguments, **options)
        self.compiles_functions = compiles_functions
        self._angles: Tensor | None = None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention.

        Args:
            hidden_states: [s tokens, b samples, hidden].
            attention_mask: passed to the core attention.
            rotary_pos_emb: angles, [s, 1, 1, r] fp32; None without rotary positions.
            options: further arguments of megatron's class.

        Returns:
            Output [s, b, hidden], and the bias if the caller must add it, else None.
        """
        self._angles = rotary_pos_emb
        output: tuple[Tensor, Tensor | None] = super().forward(
            hidden_states, attention_mask, **options
        )
        self._angles = None
        return output

    def get_query_key_value_tensors(
        self, *arguments: Any, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [s, b, h, d], keys and values [s, b, g, d]; megatron calls this method."""
        query, key, value = super().get_query_key_value_tensors(*arguments, **options)
        if self._angles is not None:
            function = compiled_rotate() if self.compiles_functions else rotate
            query, key = function(query, key, self._angles)
        return query, key, value


def rotate(query: Tensor, key: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first r elements of each head.

    Args:
        query: [s, b, h, d].
        key: [s, b, g, d].
        angles: [s, 1, 1, r] fp32, where r <= d; the second half of the r angles repeats the first.

    Returns:
        Rotated queries and keys, with the dtypes and shapes of the arguments.
    """
    cosines, sines = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
    return _rotate(query, cosines, sines), _rotate(key, cosines, sines)


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    width = cosines.shape[-1]
    rotated, rest = (x, None) if width == x.shape[-1] else (x[..., :width], x[..., width:])
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cosines + torch.cat((-second, first), dim=-1) * sines
    return rotated if rest is None else torch.cat((rotated, rest), dim=-1)


@cache
def compiled_rotate() -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return `rotate` compiled by torch.compile: one kernel, and one in the backward pass.

    One function serves all layers, so each shape is compiled once per process.
    """
    return torch.compile(rotate)
