"""The model: its dimensions and the parts it is made of."""

from typing import Any, Literal

from pydantic import Field, model_validator

from frontier_llm.config.section import Section

DECODER_MULTIPLE = 8
"""The decoder's length is a multiple of this (by padding): for matrix units, and so that tensor
ranks can cut it."""


class ModelConfig(Section):
    """A decoder (GPT) or an encoder-decoder (T5), in any of the field's usual variants."""

    name: str
    """What the run calls this model."""
    kind: Literal["gpt", "t5"]
    """Architecture family: a decoder alone, or an encoder and a decoder that reads its output."""
    layers: int = Field(ge=1)
    """Transformer layers; of an encoder-decoder those of both, the encoder's first."""
    encoder_layers: int = Field(ge=0)
    """How many of them are the encoder's. null = none in a GPT, half in an encoder-decoder."""
    hidden: int = Field(ge=1)
    """Width of the residual stream."""
    heads: int = Field(ge=1)
    """Attention heads (of the queries)."""
    kv_heads: int = Field(ge=1)
    """Heads of keys and values; fewer than `heads` is grouped-query attention. null = heads."""
    head_dim: int = Field(ge=1)
    """Width of one head. null = hidden / heads."""
    ffn: int = Field(ge=1)
    """Inner width of the feed-forward block. null = 4 x hidden."""
    vocabulary: int = Field(ge=2)
    """Distinct tokens, without padding; cut over tensor ranks with padding where needed."""
    positions: Literal["learned", "rotary", "relative"]
    """How positions enter: a learned table, rotated queries and keys, or a learned number for each
    head and distance, added to the attention scores."""
    rotary_base: int = Field(ge=1)
    """Base of the rotary wavelengths."""
    rotary_fraction: float = Field(gt=0, le=1)
    """Share of each head that is rotated."""
    relative_buckets: int = Field(ge=2)
    """Distances that relative positions tell apart; larger ones share a bucket."""
    relative_distance: int = Field(ge=2)
    """Distance from which on all are one."""
    norm: Literal["layernorm", "rmsnorm"]
    """Normalisation before attention, feed-forward block and head."""
    norm_epsilon: float = Field(gt=0)
    """Added to the variance."""
    activation: Literal["gelu", "gelu_exact", "swiglu", "geglu"]
    """Non-linearity of the feed-forward block; swiglu and geglu are gated and have a third matrix.
    gelu and geglu compute GELU by tanh, gelu_exact by the error function."""
    residual: Literal["sequential", "parallel"]
    """Whether the feed-forward block reads what attention has added, or both read the same."""
    bias: bool
    """Whether linear layers have biases."""
    tied: bool
    """Whether the head shares the embedding's matrix."""
    dropout: float = Field(ge=0, lt=1)
    """Dropout on the embedding and on the residual branches."""
    attention_dropout: float = Field(ge=0, lt=1)
    """Dropout on the attention probabilities."""
    scaled_attention: bool
    """Whether attention scores are divided by the square root of head_dim."""
    init_std: float = Field(gt=0)
    """Standard deviation of a GPT's initial weights; outputs of branches get std / sqrt(2 layers).
    A T5's deviations follow from its dimensions: of those it is a factor, 1 as published."""

    @model_validator(mode="before")
    @classmethod
    def fill_derived_dimensions(cls, values: Any) -> Any:
        """Replace each null dimension by what follows from the others."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        hidden, heads = values.get("hidden"), values.get("heads")
        layers = values.get("layers")
        if isinstance(layers, int) and values.get("encoder_layers") is None:
            values["encoder_layers"] = layers // 2 if values.get("kind") == "t5" else 0
        if isinstance(hidden, int) and values.get("ffn") is None:
            values["ffn"] = 4 * hidden
        if isinstance(heads, int) and heads > 0:
            if values.get("kv_heads") is None:
                values["kv_heads"] = heads
            if isinstance(hidden, int) and values.get("head_dim") is None:
                values["head_dim"] = max(1, hidden // heads)
        return values

    @property
    def gated(self) -> bool:
        """Whether the feed-forward block multiplies by a gate."""
        return self.activation in ("swiglu", "geglu")

    def reads_encoder(self, layer: int) -> bool:
        """Whether a layer attends to the encoder's output, beside its own stack's."""
        return 0 < self.encoder_layers <= layer
