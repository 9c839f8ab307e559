"""The cross entropy of each token over the vocabulary without padding.

Logits are the largest tensor of a step: [tokens, vocabulary]. They are stored once, in the dtype of
the head. All fp32 numbers are computed for a few tokens at a time, and the backward pass overwrites
the logits with their gradient. megatron's cross entropy of logits in 16 bits also holds a copy of
all of them in fp32, and a separate gradient.

The tensor ranks hold parts of the vocabulary. They exchange three numbers per token: the maximum,
the sum of exponentials, and the logit of the target (arXiv:1909.08053, section 3).
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from frontier_llm.geometry.message_memory import CPU_LOSS_CHUNK_BYTES, LOSS_CHUNK_BYTES


def token_losses(
    logits_sbv: Tensor, labels: Tensor, vocabulary: int, group: dist.ProcessGroup
) -> Tensor:
    """Return the cross entropy of each token.

    Collective over `group`, in the forward pass only.

    Args:
        logits_sbv: [s tokens, b samples, v logits], where v is this tensor rank's part of the
            padded vocabulary. The backward pass overwrites them.
        labels: [b, s] int64.
        vocabulary: size of the vocabulary without padding.
        group: the tensor ranks.

    Returns:
        [b, s] fp32.
    """
    logits = logits_sbv.flatten(0, 1)
    targets = labels.transpose(0, 1).flatten()
    losses: Tensor = _CrossEntropy.apply(logits, targets, vocabulary, group)
    return losses.view(logits_sbv.shape[:2]).transpose(0, 1)


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of logits [n tokens, v] and targets [n]; the result is [n] fp32."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocabulary: int, group: dist.ProcessGroup
    ) -> Tensor:
        """Compute the losses, and store for each token the logarithm of the softmax's divisor."""
        width, rank = logits.shape[1], group.rank()
        unpadded = _unpadded(width, vocabulary, rank)
        used = logits[:, :unpadded]
        is_own = (targets >= rank * width) & (targets < rank * width + unpadded)
        columns = torch.where(is_own, targets - rank * width, 0)

        largest = _largest(used)
        _reduce(largest, dist.ReduceOp.MAX, group)
        sums = torch.empty(2, len(targets), dtype=torch.float32, device=logits.device)
        exponentials, target_logits = sums.unbind()
        for rows, scratch in _chunks(used):
            torch.sub(used[rows], largest[rows, None], out=scratch)
            torch.sum(scratch.exp_(), 1, out=exponentials[rows])
        if unpadded:
            target_logits.copy_(used.gather(1, columns[:, None])[:, 0])
        target_logits.masked_fill_(~is_own, 0.0)
        _reduce(sums, dist.ReduceOp.SUM, group)

        log_divisors = exponentials.log_().add_(largest)
        ctx.unpadded = unpadded
        ctx.save_for_backward(logits, log_divisors, columns, is_own)
        return log_divisors - target_logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Overwrite the logits with their gradient: (softmax - 1 at the target) * grad."""
        logits, log_divisors, columns, is_own = ctx.saved_tensors
        (grad,) = grads
        used = logits[:, : ctx.unpadded]
        for rows, softmax in _chunks(used) if ctx.unpadded else ():
            torch.sub(used[rows], log_divisors[rows, None], out=softmax)
            softmax.exp_().scatter_add_(1, columns[rows, None], -is_own[rows, None].float())
            torch.mul(softmax, grad[rows, None], out=used[rows])
        logits[:, ctx.unpadded :] = 0.0
        return logits, None, None, None


def mask_padding(logits: Tensor, vocabulary: int, tensor_rank: int) -> None:
    """Set the logits of the vocabulary's padding to the lowest number, in place.

    Args:
        logits: [..., v], where v is this tensor rank's part of the padded vocabulary. Overwritten.
        vocabulary: size of the vocabulary without padding.
        tensor_rank: index of this tensor rank's part.
    """
    unpadded = _unpadded(logits.shape[-1], vocabulary, tensor_rank)
    logits[..., unpadded:] = torch.finfo(logits.dtype).min


def _unpadded(width: int, vocabulary: int, tensor_rank: int) -> int:
    """Return how many of a tensor rank's `width` columns are not padding of the vocabulary."""
    return max(0, min(width, vocabulary - tensor_rank * width))


def _largest(logits: Tensor) -> Tensor:
    """Return the largest logit of each token, [n] fp32; the lowest number without columns."""
    if not logits.shape[1]:
        lowest = torch.finfo(torch.float32).min
        return torch.full((len(logits),), lowest, device=logits.device)
    return logits.amax(1).float()


def _chunks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield ranges of tokens whose logits take at most a chunk in fp32, with room for them.

    Yields:
        (the range of k tokens, [k, v] fp32 with undefined contents, the same memory each time).
    """
    limit = CPU_LOSS_CHUNK_BYTES if logits.device.type == "cpu" else LOSS_CHUNK_BYTES
    width = logits.shape[1]
    tokens = min(len(logits), max(1, limit // (4 * max(1, width))))
    scratch = torch.empty(tokens, width, dtype=torch.float32, device=logits.device)
    for first in range(0, len(logits), tokens):
        stop = min(first + tokens, len(logits))
        yield slice(first, stop), scratch[: stop - first]


def _reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, op, group=group)
