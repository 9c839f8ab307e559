"""The cross entropy of each token over the vocabulary without padding.

Logits are the largest tensor of a step: [tokens, vocabulary]. They are stored once, in the dtype of
the head. All fp32 numbers are computed for a few tokens at a time, and the backward pass overwrites
the logits with their gradient. megatron's cross entropy of logits in 16 bits also holds a copy of
all of them in fp32, and a separate gradient.

The tensor ranks hold parts of the vocabulary. They exchange three numbers per token: the maximum,
the sum of exponentials, and the logit of the target (arXiv:1909.08053, section 3). The logarithm of
the sum, log Z, is returned too, because z-loss is a multiple of its square (PaLM, arXiv:2204.02311,
section 5).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from frontier_llm.geometry.state_memory import CPU_LOSS_CHUNK_BYTES, LOSS_CHUNK_BYTES


class TokenLosses(NamedTuple):
    """The cross entropy of each token, and the number of its z-loss; both have gradients."""

    cross_entropy: Tensor
    """[b, s] fp32."""
    log_divisor: Tensor
    """[b, s] fp32: log Z, where Z is the divisor of the softmax, the sum of the exponentials of the
    logits without padding."""

    def means(self, average: Callable[[Tensor], Tensor], z_loss: float) -> Tensor:
        """Return the mean cross entropy, [1], or with z-loss also the mean z-loss, [2]; fp32.

        `average` returns the mean of a number per token, [b, s], as a scalar. The z-loss of a token
        is z_loss * log(Z)^2.
        """
        means = [average(self.cross_entropy)]
        if z_loss:
            means.append(average(z_loss * self.log_divisor.square()))
        return torch.stack(means)


def token_losses(
    logits_sbv: Tensor,
    labels: Tensor,
    vocabulary: int,
    group: dist.ProcessGroup,
    softcap: float | None = None,
) -> TokenLosses:
    """Compute the cross entropy of each token. Collective over `group`, forward only.

    Logits are [s tokens, b samples, v logits], where v is this tensor rank's part of the padded
    vocabulary. The backward pass overwrites them, and so does the forward pass if there is a bound
    c (`softcap`): they become c * tanh(logit / c) (Gemma 2, arXiv:2408.00118, section 2). Labels
    are [b, s] int64.
    """
    logits = logits_sbv.flatten(0, 1)
    targets = labels.transpose(0, 1).flatten()
    results: tuple[Tensor, Tensor] = _CrossEntropy.apply(
        logits, targets, vocabulary, group, softcap
    )
    return TokenLosses(*(x.view(logits_sbv.shape[:2]).transpose(0, 1) for x in results))


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of logits [n tokens, v] and targets [n], and log Z; both are [n] fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        vocabulary: int,
        group: dist.ProcessGroup,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the losses and log Z, the logarithm of the softmax's divisor, of each token."""
        width, rank = logits.shape[1], group.rank()
        unpadded = _unpadded(width, vocabulary, rank)
        used = logits[:, :unpadded]
        is_own = (targets >= rank * width) & (targets < rank * width + unpadded)
        columns = torch.where(is_own, targets - rank * width, 0)
        if softcap is not None and unpadded:
            _cap(used, softcap)

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
        ctx.unpadded, ctx.softcap = unpadded, softcap
        ctx.save_for_backward(logits, log_divisors, columns, is_own)
        ctx.set_materialize_grads(False)
        return log_divisors - target_logits, log_divisors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        """Overwrite the logits with their gradient.

        Of a token, let g be the gradient of its cross entropy, and h that of its log Z (0 if log Z
        is not used). Its logits get the gradient (g + h) * softmax, minus g at the target. If
        logits have a bound c, the gradient is multiplied by that of c * tanh(x / c), which is
        1 - (capped logit / c)^2.
        """
        logits, log_divisors, columns, is_own = ctx.saved_tensors
        grad, grad_divisors = grads
        grad = torch.zeros_like(log_divisors) if grad is None else grad
        used = logits[:, : ctx.unpadded]
        for rows, softmax in _chunks(used) if ctx.unpadded else ():
            torch.sub(used[rows], log_divisors[rows, None], out=softmax)
            softmax.exp_()
            if grad_divisors is None and ctx.softcap is None:
                softmax.scatter_add_(1, columns[rows, None], -is_own[rows, None].float())
                torch.mul(softmax, grad[rows, None], out=used[rows])
                continue
            softmax.mul_((grad if grad_divisors is None else grad + grad_divisors)[rows, None])
            at_target = torch.where(is_own, -grad, 0.0)
            softmax.scatter_add_(1, columns[rows, None], at_target[rows, None])
            if ctx.softcap is not None:
                softmax.mul_(1 - (used[rows].float() / ctx.softcap).square_())
            used[rows] = softmax
        logits[:, ctx.unpadded :] = 0.0
        return logits, None, None, None, None


def mask_padding(logits: Tensor, vocabulary: int, tensor_rank: int) -> None:
    """Set the padding in a tensor rank's part [..., v] to the lowest number, in place."""
    unpadded = _unpadded(logits.shape[-1], vocabulary, tensor_rank)
    logits[..., unpadded:] = torch.finfo(logits.dtype).min


def _cap(logits: Tensor, bound: float) -> None:
    """Replace logits [n, v] by bound * tanh(logit / bound), computed in fp32, in place."""
    for rows, scratch in _chunks(logits):
        torch.div(logits[rows], bound, out=scratch)
        logits[rows] = scratch.tanh_().mul_(bound)


def _unpadded(width: int, vocabulary: int, tensor_rank: int) -> int:
    """Return how many of a tensor rank's `width` columns are not padding of the vocabulary."""
    return max(0, min(width, vocabulary - tensor_rank * width))


def _largest(logits: Tensor) -> Tensor:
    """Return the largest logit of each token, [n] fp32; the lowest fp32 number if v is 0."""
    if not logits.shape[1]:
        lowest = torch.finfo(torch.float32).min
        return torch.full((len(logits),), lowest, device=logits.device)
    return logits.amax(1).float()


def _chunks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield ranges of tokens, and a scratch tensor for the fp32 logits of each range.

    A range has as many tokens as fit in `LOSS_CHUNK_BYTES` in fp32 (on a CPU
    `CPU_LOSS_CHUNK_BYTES`), and at least one. The scratch tensors have undefined contents in the
    same memory.
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
