"""Floating-point operations of a training step, counted for each matrix.

A product of [m, k] and [k, n] is 2mkn operations. The backward pass costs twice the forward.
Norms, activations, softmax and the embedding's look-up are not counted, as is usual.

Model FLOPs (for MFU) are those of a forward and a backward pass; hardware FLOPs (for HFU) add the
recomputation of activations, but not what an attention kernel recomputes inside its backward pass.
Attention is counted in full, without halving for causality (the convention of Megatron-LM and
PaLM); `causal=True` halves it.

Sources: Narayanan et al., SC'21 (arXiv:2104.04473), section 5.1 and appendix; PaLM
(arXiv:2204.02311), appendix B for MFU and HFU.
"""

from dataclasses import dataclass

from frontier_llm.config.model import ModelConfig
from frontier_llm.geometry.lengths import SampleLengths, sample_lengths


@dataclass(frozen=True)
class ForwardFlops:
    """Operations of a forward pass over one sample, by part of the model."""

    projections: float
    """Query, key, value and output matrices, including those of cross attention."""
    attention: float
    """Scores and weighted values."""
    feed_forward: float
    """Two matrices, or three when gated."""
    head: float
    """The product with the vocabulary."""

    @property
    def layers(self) -> float:
        """All transformer layers, without the head."""
        return self.projections + self.attention + self.feed_forward

    @property
    def total(self) -> float:
        """The whole model."""
        return self.layers + self.head


def forward_flops(
    model: ModelConfig, sequence_length: int, *, causal: bool = False
) -> ForwardFlops:
    """Count one forward pass over one sample.

    Args:
        model: dimensions.
        sequence_length: tokens of a GPT's sample, or of the encoder's input; the decoder's length
            follows from it (geometry/lengths.py).
        causal: count only the unmasked half of the decoder's scores.
    """
    lengths = sample_lengths(model, sequence_length)
    border = model.encoder_layers
    encoder = layer_flops(model, 0, lengths, causal=causal)
    decoder = layer_flops(model, border, lengths, causal=causal)
    kinds = ((border, encoder), (model.layers - border, decoder))
    return ForwardFlops(
        projections=sum(layers * flops.projections for layers, flops in kinds),
        attention=sum(layers * flops.attention for layers, flops in kinds),
        feed_forward=sum(layers * flops.feed_forward for layers, flops in kinds),
        head=2 * lengths.decoder * model.hidden * model.vocabulary,
    )


def layer_flops(
    model: ModelConfig, layer: int, lengths: SampleLengths, *, causal: bool = False
) -> ForwardFlops:
    """Count one layer's forward pass over one sample; its head is 0."""
    in_encoder = layer < model.encoder_layers
    tokens = lengths.encoder if in_encoder else lengths.decoder
    query, key_value = model.heads * model.head_dim, model.kv_heads * model.head_dim
    projections = 2 * tokens * model.hidden * (2 * query + 2 * key_value)
    attention = 2 * 2 * tokens * tokens * query * (0.5 if causal and not in_encoder else 1)
    if model.reads_encoder(layer):
        of_decoder, of_encoder = 2 * query * tokens, 2 * key_value * lengths.encoder
        projections += 2 * model.hidden * (of_decoder + of_encoder)
        attention += 2 * 2 * tokens * lengths.encoder * query
    matrices = 3 if model.gated else 2
    feed_forward = 2 * tokens * model.hidden * model.ffn * matrices
    return ForwardFlops(projections, attention, feed_forward, head=0.0)


def step_model_flops(model: ModelConfig, sequence_length: int, samples: int) -> float:
    """Count the operations of a forward and a backward pass over `samples`."""
    return 3 * samples * forward_flops(model, sequence_length).total


def step_hardware_flops(
    model: ModelConfig, sequence_length: int, samples: int, recompute: str
) -> float:
    """Count the operations that are executed, including recomputation.

    Args:
        model: dimensions.
        sequence_length: as in `forward_flops`.
        samples: samples per step.
        recompute: `none`, `selective` (the attention core) or `full` (every layer).
    """
    once = forward_flops(model, sequence_length)
    again = {"none": 0.0, "selective": once.attention, "full": once.layers}[recompute]
    return samples * (3 * once.total + again)
