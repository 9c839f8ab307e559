"""The loss of each token over the true vocabulary."""

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor


def token_losses(logits_sbv: Tensor, labels: Tensor, vocabulary: int, tensor_rank: int) -> Tensor:
    """Return the cross entropy of each token.

    Args:
        logits_sbv: [s, b, v] this tensor rank's part of the padded vocabulary. Overwritten.
        labels: [b, s] int64.
        vocabulary: true size.
        tensor_rank: which part.

    Returns:
        [b, s] fp32.
    """
    mask_padding(logits_sbv, vocabulary, tensor_rank)
    loss_sb = vocab_parallel_cross_entropy(logits_sbv, labels.transpose(0, 1).contiguous())
    loss_bs: Tensor = loss_sb.transpose(0, 1)
    return loss_bs


def mask_padding(logits: Tensor, vocabulary: int, tensor_rank: int) -> None:
    """Set the logits of rows that only pad the vocabulary to the lowest number, in place.

    Left alone, each padded row is a token of logit 0 that takes probability from all others.

    Args:
        logits: [..., v], this tensor rank's part of the padded vocabulary. Overwritten.
        vocabulary: true size.
        tensor_rank: which part.
    """
    width = logits.shape[-1]
    true = max(0, min(width, vocabulary - tensor_rank * width))
    if true < width:
        logits[..., true:] = torch.finfo(logits.dtype).min
