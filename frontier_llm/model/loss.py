"""Compute the cross entropy of each token over the vocabulary without its padding.

The vocabulary is padded so that tensor-parallel ranks can divide the embedding and the logits.
"""

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor


def token_losses(logits_sbv: Tensor, labels: Tensor, vocabulary: int, tensor_rank: int) -> Tensor:
    """Return the cross entropy of each token.

    Args:
        logits_sbv: [s tokens, b samples, v logits], where v is this tensor rank's part of the
            padded vocabulary. They are overwritten.
        labels: [b, s] int64.
        vocabulary: size of the vocabulary without padding.
        tensor_rank: index of this tensor rank's part.

    Returns:
        Losses in nats, [b, s] fp32.
    """
    mask_padding(logits_sbv, vocabulary, tensor_rank)
    loss_sb = vocab_parallel_cross_entropy(logits_sbv, labels.transpose(0, 1).contiguous())
    loss_bs: Tensor = loss_sb.transpose(0, 1)
    return loss_bs


def mask_padding(logits: Tensor, vocabulary: int, tensor_rank: int) -> None:
    """Set the logits of the vocabulary's padding to the lowest number, in place.

    Otherwise each padding entry would count as a token with logit 0, which would take probability
    from the real tokens.

    Args:
        logits: [..., v], where v is this tensor rank's part of the padded vocabulary.
        vocabulary: size of the vocabulary without padding.
        tensor_rank: index of this tensor rank's part.
    """
    width = logits.shape[-1]
    unpadded = max(0, min(width, vocabulary - tensor_rank * width))
    if unpadded < width:
        logits[..., unpadded:] = torch.finfo(logits.dtype).min
