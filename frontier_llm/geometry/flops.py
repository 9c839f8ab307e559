"""Count the floating-point operations of a training step, matrix by matrix.

A product of an [m, k] and a [k, n] matrix takes 2mkn operations. The backward pass takes twice as
many as the forward pass. As is usual, norms, activation functions, softmax and the look-up in the
embedding are not counted.

Model FLOPs (for MFU) are the operations of a forward and a backward pass. Hardware FLOPs (for HFU)
also include recomputed layers or attention, but not the operations that an attention kernel
repeats inside its backward pass. Attention scores are counted in full, as in Megatron-LM and PaLM.
With `causal=True` only the unmasked half of them counts.

Sources: Narayanan et al., SC'21 (arXiv:2104.04473), section 5.1 and appendix; PaLM
(arXiv:2204.02311), appendix B for MFU and HFU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.lengths import SampleLengths, sample_lengths


@dataclass(frozen=True)
class ForwardFlops:
    """Number of operations of a forward pass over one sample, by part of the model."""

    projections: float
    """Products with the query, key, value and output matrices, also in cross attention."""
    attention: float
    feed_forward: float
    """Products with the two matrices of feed-forward blocks, or three if gated."""
    head: float

    @property
    def layers(self) -> float:
        """Operations of all transformer layers, without the head."""
        return self.projections + self.attention + self.feed_forward

    @property
    def total(self) -> float:
        """Operations of the whole model."""
        return self.layers + self.head


def forward_flops(
    model: ModelConfig, sequence_length: int, *, causal: bool = False
) -> ForwardFlops:
    """Count the operations of a forward pass over one sample.

    With `causal`, only the unmasked half of the decoder's scores counts. The length of the decoder
    of an encoder-decoder follows from `sequence_length` (geometry/lengths.py).
    """
    lengths = sample_lengths(model, sequence_length)
    kinds = [
        (len(alike), layer_flops(model, alike[0], lengths, causal=causal))
        for alike in equal_layers(model, range(model.layers))
    ]
    return ForwardFlops(
        projections=sum(layers * flops.projections for layers, flops in kinds),
        attention=sum(layers * flops.attention for layers, flops in kinds),
        feed_forward=sum(layers * flops.feed_forward for layers, flops in kinds),
        head=2 * lengths.decoder * model.hidden * model.vocabulary,
    )


def layer_flops(
    model: ModelConfig, layer: int, lengths: SampleLengths, *, causal: bool = False
) -> ForwardFlops:
    """Count the operations of one layer in a forward pass over one sample."""
    in_encoder = layer < model.encoder_layers
    tokens = lengths.encoder if in_encoder else lengths.decoder
    query, key_value = model.heads * model.head_dim, model.kv_heads * model.head_dim
    projections = 2 * tokens * model.hidden * (2 * query + 2 * key_value)
    attention = 2 * 2 * query * score_pairs(model, layer, tokens, causal=causal and not in_encoder)
    if model.reads_encoder(layer):
        # queries and outputs of the decoder's tokens, keys and values of the encoder's tokens
        decoder_side, encoder_side = 2 * query * tokens, 2 * key_value * lengths.encoder
        projections += 2 * model.hidden * (decoder_side + encoder_side)
        attention += 2 * 2 * tokens * lengths.encoder * query
    matrices = 3 if model.gated else 2
    feed_forward = 2 * tokens * model.hidden * model.ffn * matrices
    return ForwardFlops(projections, attention, feed_forward, head=0.0)


def equal_layers(model: ModelConfig, layers: range) -> list[Sequence[int]]:
    """Divide consecutive layers into sets of layers with the same operations.

    Encoder layers differ from decoder layers, and layers with a window from those without.
    """
    border = min(max(model.encoder_layers, layers.start), layers.stop)
    parts: list[Sequence[int]] = [range(layers.start, border), range(border, layers.stop)]
    if model.window is not None:
        parts = [
            [x for x in layers if model.layer_window(x)],
            [x for x in layers if not model.layer_window(x)],
        ]
    return [part for part in parts if part]


def score_pairs(model: ModelConfig, layer: int, tokens: int, *, causal: bool) -> float:
    """Count the scores of a layer's self attention, per head and sample of s tokens.

    If only unmasked scores count (`causal`), these are half of s^2, or s * w - w^2 / 2 with a
    window of w tokens. Otherwise s^2 count, or s * w.
    """
    reach = min(tokens, model.layer_window(layer) or tokens)
    return reach * (tokens - reach / 2) if causal else float(tokens * reach)


def step_model_flops(model: ModelConfig, sequence_length: int, samples: int) -> float:
    """Count the operations of a forward and a backward pass over a number of samples."""
    return 3 * samples * forward_flops(model, sequence_length).total


def step_hardware_flops(
    model: ModelConfig, sequence_length: int, samples: int, recompute: str
) -> float:
    """Count the operations that a step executes, including recomputation.

    `recompute` is `none`, `selective` (attention without its projections) or `full` (every layer).
    """
    forward = forward_flops(model, sequence_length)
    repeated = {"none": 0.0, "selective": forward.attention, "full": forward.layers}
    return samples * (3 * forward.total + repeated[recompute])
