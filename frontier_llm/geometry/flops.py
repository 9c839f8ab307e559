"""Count the floating-point operations of a training step, matrix by matrix.

A product of an [m, k] and a [k, n] matrix takes 2mkn operations. The backward pass takes twice as
many as the forward pass. As is usual, norms, activation functions, softmax and the look-up in the
embedding are not counted.

Model FLOPs (for MFU) are the operations of a forward and a backward pass. Hardware FLOPs (for HFU)
also include recomputed layers or attention, but not the operations that an attention kernel
repeats inside its backward pass. Attention scores are counted in full, as in Megatron-LM and PaLM,
but not those between separate documents.

Sources: Narayanan et al., SC'21 (arXiv:2104.04473), section 5.1 and appendix; PaLM
(arXiv:2204.02311), appendix B for MFU and HFU.
"""

from typing import NamedTuple

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.lengths import SampleLengths


class ForwardFlops(NamedTuple):
    """Number of operations of a forward pass over one sample, by part of the model."""

    layers: float
    """Operations of all transformer layers, without the head."""
    attention: float
    """Those of `layers` for attention scores and weighted values."""
    head: float

    @property
    def total(self) -> float:
        """Operations of the whole model."""
        return self.layers + self.head


def forward_flops(
    model: ModelConfig, lengths: SampleLengths, read_share: float = 1.0
) -> ForwardFlops:
    """Count the operations of a forward pass over one sample.

    `read_share` is that of `score_pairs`.
    """
    matrices = 3 if model.gated else 2
    products = attention = 0.0
    for layers in equal_layers(model, range(model.layers)):
        side = model.side(layers[0])
        query, key_value = side.heads * side.head_dim, side.kv_heads * side.head_dim
        tokens = lengths.encoder if layers[0] < model.encoder_layers else lengths.decoder
        weights = 2 * query + 2 * key_value + matrices * side.ffn
        products += len(layers) * 2 * tokens * side.hidden * weights
        pairs = score_pairs(model, layers[0], tokens, read_share, causal=False)
        if model.reads_encoder(layers[0]):
            # queries and outputs of the decoder's tokens, keys and values of the encoder's tokens
            is_merged = model.merges_attention(layers[0])
            features = 0 if is_merged else 2 * query * tokens * model.hidden
            features += 2 * key_value * lengths.encoder * model.encoder.hidden
            products += len(layers) * 2 * features
            pairs += read_share * tokens * lengths.encoder
        attention += len(layers) * 4 * query * pairs
    head = 2 * lengths.decoder * model.hidden * model.vocabulary
    return ForwardFlops(products + attention, attention, head)


def equal_layers(model: ModelConfig, layers: range) -> list[list[int]]:
    """Divide consecutive layers into sets of layers with the same operations.

    Encoder layers differ from decoder layers, and layers with a window from those without.
    """
    parts: dict[tuple[bool, int | None], list[int]] = {}
    for layer in layers:
        kind = layer < model.encoder_layers, model.layer_window(layer)
        parts.setdefault(kind, []).append(layer)
    return list(parts.values())


def has_unlike_layers(model: ModelConfig) -> bool:
    """Return whether some layers have other operations than others."""
    return len(equal_layers(model, range(model.layers))) > 1


def score_pairs(
    model: ModelConfig, layer: int, tokens: int, read_share: float = 1.0, *, causal: bool
) -> float:
    """Count the scores of a layer's self attention, per head and sample of s tokens.

    If only unmasked scores count (`causal`), these are half of s^2, or s * w - w^2 / 2 with a
    window of w tokens. Otherwise s^2 count, or s * w, where an encoder's window w has the tokens on
    both sides. Of the pairs of tokens `read_share` are in the same document; with a window, the
    smaller of both counts is an upper bound.
    """
    before, after = model.layer_bounds(layer)
    reach = min(tokens, (before or tokens) + (after or tokens) - 1)
    of_documents = read_share * tokens * tokens
    if causal:
        return min(reach * (tokens - reach / 2), of_documents / 2)
    return min(float(tokens * reach), of_documents)


def step_model_flops(
    model: ModelConfig, lengths: SampleLengths, samples: int, read_share: float = 1.0
) -> float:
    """Count the operations of a forward and a backward pass over a number of samples."""
    return 3 * samples * forward_flops(model, lengths, read_share).total


def step_hardware_flops(
    model: ModelConfig,
    lengths: SampleLengths,
    samples: int,
    recompute: str,
    read_share: float = 1.0,
) -> float:
    """Count the operations that a step executes, including recomputation.

    `recompute` is `none`, `selective` (attention without its projections) or `full` (every layer).
    """
    forward = forward_flops(model, lengths, read_share)
    repeated = {"none": 0.0, "selective": forward.attention, "full": forward.layers}
    return samples * (3 * forward.total + repeated[recompute])
