"""Relative positions (T5, arXiv:1910.10683, section 2.1): a learned number a head and distance.

Distances share buckets: half of them hold one distance each, the others ranges that grow
logarithmically up to a largest one. Where a token sees both sides, each side has half of them.
"""

import math

import torch
from torch import Tensor, nn


class RelativePositions(nn.Module):
    """One stack's table, on the heads of one tensor rank.

    Attributes:
        weight: [buckets, h].
        bucket: [2 * distance + 1] int64, of each distance.
    """

    bucket: Tensor

    def __init__(
        self, buckets: int, distance: int, heads: int, *, causal: bool, dtype: torch.dtype
    ) -> None:
        """Make the table.

        Args:
            buckets: rows.
            distance: from which on all distances are one.
            heads: h, of this tensor rank.
            causal: whether only earlier tokens are seen.
            dtype: of the table.
        """
        super().__init__()
        device = torch.get_default_device()
        self.weight = nn.Parameter(torch.zeros(buckets, heads, dtype=dtype, device=device))
        of_distance = bucket_of_distance(buckets, distance, causal=causal)
        self.register_buffer("bucket", of_distance.to(device), persistent=False)

    def forward(self) -> Tensor:
        """Return [2 * distance + 1, h]: the number of each distance (key - query), -distance on.

        It is a copy: layers may read it after the table itself is gone.
        """
        return self.weight[self.bucket]


def bucket_of_distance(buckets: int, distance: int, *, causal: bool) -> Tensor:
    """Return [2 * distance + 1] int64: the bucket of each distance, -distance..distance.

    In fp32 and on the CPU whatever computes with it: a logarithm that falls on the border of a
    bucket must fall on the same side everywhere.
    """
    with torch.device("cpu"):
        place = torch.arange(-distance, distance + 1)
        if causal:
            first, away = torch.zeros_like(place), (-place).clamp(min=0)
        else:
            buckets //= 2
            first, away = (place > 0) * buckets, place.abs()
        single = buckets // 2
        growth = torch.log(away.clamp(min=1).float() / single) / math.log(distance / single)
        shared = single + (growth * (buckets - single)).long()
        return first + torch.where(away < single, away, shared.clamp(max=buckets - 1))


def block_bias(
    of_distance: Tensor, rows: range, keys: int, mask: Tensor | None, *, causal: bool
) -> Tensor:
    """Return what is added to the scores of some queries.

    Args:
        of_distance: [2r + 1, h], what `RelativePositions` returns.
        rows: the queries' places.
        keys: t, keys from the first on.
        mask: [b, 1, 1, t] bool, true where a key is a token; None = everywhere.
        causal: hide keys behind the query.

    Returns:
        [1 or b, h, rows, t], -inf where a key is hidden. (A finite number would give rows in
        which all keys are hidden a gradient.)
    """
    reach = of_distance.shape[0] // 2
    # place by place along a diagonal, from the lower left corner to the upper right one
    places = torch.arange(1 - rows.stop, keys - rows.start, device=of_distance.device)
    diagonal = of_distance[places.clamp(-reach, reach) + reach].T
    if causal:
        diagonal = diagonal.masked_fill(places > 0, -torch.inf)
    # row r of the block is the window that ends r places before the last
    bias = diagonal.unfold(1, keys, 1).flip(1)[None]
    return bias if mask is None else bias.masked_fill(~mask, -torch.inf)
