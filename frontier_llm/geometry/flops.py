"""Floating-point operations of a training step, counted matrix by matrix.

A product of [m, k] and [k, n] is 2mkn operations. The backward pass costs twice the forward.
Norms, activations, softmax and the embedding's look-up are not counted, as is usual.

Model FLOPs (MFU) are what the mathematics needs; hardware FLOPs (HFU) add what is computed twice
because of recomputation. Attention is counted in full, without halving for causality (the
convention of Megatron-LM and PaLM); `causal=True` halves it.

Sources: Narayanan et al., SC'21 (arXiv:2104.04473), section 5.1 and appendix; PaLM
(arXiv:2204.02311), appendix B for MFU and HFU.
"""

from dataclasses import dataclass

from frontier_llm.config.model import ModelConfig


@dataclass(frozen=True)
class ForwardFlops:
    """Operations of one forward pass over one sample, by where they happen."""

    projections: float
    """Query, key, value and output matrices, all layers."""
    attention: float
    """Scores and weighted values, all layers."""
    feed_forward: float
    """Two matrices, or three when gated, all layers."""
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
    """Count one forward pass over one sample of `sequence_length` tokens."""
    tokens = sequence_length
    query, key_value = model.heads * model.head_dim, model.kv_heads * model.head_dim
    projections = 2 * tokens * model.hidden * (2 * query + 2 * key_value)
    attention = 2 * 2 * tokens * tokens * query * (0.5 if causal else 1)
    matrices = 3 if model.gated else 2
    feed_forward = 2 * tokens * model.hidden * model.ffn * matrices
    return ForwardFlops(
        projections=model.layers * projections,
        attention=model.layers * attention,
        feed_forward=model.layers * feed_forward,
        head=2 * tokens * model.hidden * model.vocabulary,
    )


def step_model_flops(model: ModelConfig, sequence_length: int, samples: int) -> float:
    """Count the operations that a forward and backward pass over `samples` needs."""
    return 3 * samples * forward_flops(model, sequence_length).total


def step_hardware_flops(
    model: ModelConfig, sequence_length: int, samples: int, recompute: str
) -> float:
    """Count the operations executed, recomputation included.

    Args:
        model: dimensions.
        sequence_length: tokens a sample.
        samples: samples a step.
        recompute: `none`, `selective` (the attention core again) or `full` (each layer again).
    """
    once = forward_flops(model, sequence_length)
    again = {"none": 0.0, "selective": once.attention, "full": once.layers}[recompute]
    return samples * (3 * once.total + again)
