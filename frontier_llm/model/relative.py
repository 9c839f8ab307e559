"""Compute relative positions: a learned bias of attention scores per head and distance.

A distance is the position of a key minus the position of a query. Each distance belongs to a
bucket, and all distances of a bucket have the same bias. Half of the buckets have one distance
each. The others have ranges of distances, whose width grows exponentially up to a largest distance.
Without a causal mask, half of all buckets are for keys before the query and half for keys after it.

Paper: T5, arXiv:1910.10683, section 2.1.
"""

import math

import torch
from torch import Tensor, nn

from frontier_llm.model.reads import Reads


class RelativePositions(nn.Module):
    """The biases of one encoder or decoder, for the heads of one tensor-parallel rank.

    The weight is [buckets, heads]. The buffer is [2r + 1] int64, the bucket of each distance from
    -r to r, where r is the largest distance. Greater distances have the same bucket as r.
    """

    bucket: Tensor

    def __init__(
        self, buckets: int, distance: int, heads: int, *, causal: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        device = torch.get_default_device()
        self.weight = nn.Parameter(torch.zeros(buckets, heads, dtype=dtype, device=device))
        bucket = bucket_of_distance(buckets, distance, causal=causal)
        self.register_buffer("bucket", bucket.to(device), persistent=False)

    def forward(self) -> Tensor:
        """Return the bias of each distance from -r to r: [2 * r + 1, heads].

        The result is a copy of the biases, because layers read it after the memory of `weight` may
        have been released.
        """
        return self.weight[self.bucket]


def bucket_of_distance(buckets: int, distance: int, *, causal: bool) -> Tensor:
    """Return [2 * distance + 1] int64, the bucket of each distance from -distance to distance.

    The buckets are computed in fp32 on the CPU for every device, since a logarithm at the border
    of a bucket must be rounded to the same side everywhere.
    """
    with torch.device("cpu"):
        signed = torch.arange(-distance, distance + 1)
        if causal:
            first_bucket, absolute = torch.zeros_like(signed), (-signed).clamp(min=0)
        else:
            buckets //= 2
            first_bucket, absolute = (signed > 0) * buckets, signed.abs()
        single = buckets // 2  # buckets with one distance each
        growth = torch.log(absolute.clamp(min=1).float() / single) / math.log(distance / single)
        wide = single + (growth * (buckets - single)).long()
        bucket = torch.where(absolute < single, absolute, wide.clamp(max=buckets - 1))
        return first_bucket + bucket


def diagonal_bias(distance_bias: Tensor, distances: Tensor) -> Tensor:
    """Return the bias of [n] distances of any size, from `RelativePositions`: [heads, n]."""
    largest = distance_bias.shape[0] // 2
    return distance_bias[distances.clamp(-largest, largest) + largest].T


def block_bias(
    distance_bias: Tensor, queries: range, keys: int, reads: Reads, mask: Tensor | None
) -> Tensor:
    """Return the bias of the scores of a block of queries: [1 or samples, heads, queries, t].

    `queries` are their positions among the t keys. The mask is [samples, 1, 1, t] bool, false at
    padding. The bias is -inf where a key is not read. (With a finite number instead, queries whose
    keys are all masked would get a gradient.)
    """
    # All scores on a diagonal of the block [queries, t] have the same distance and so the same
    # bias. `diagonals` holds one bias per diagonal, from the lower left to the upper right corner.
    distances = torch.arange(1 - queries.stop, keys - queries.start, device=distance_bias.device)
    diagonals = diagonal_bias(distance_bias, distances)
    if reads.before is not None or reads.after is not None:
        diagonals = diagonals.masked_fill(~reads.within(-distances), -torch.inf)
    # row i of the block is a window of t diagonals; its last one is i before the last of all
    bias = diagonals.unfold(1, keys, 1).flip(1)[None]
    return bias if mask is None else bias.masked_fill(~mask, -torch.inf)
