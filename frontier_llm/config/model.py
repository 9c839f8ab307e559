"""The model: its dimensions and its variants."""

from typing import Any, Literal

from pydantic import Field, model_validator

from frontier_llm.config.section import Section

DECODER_MULTIPLE = 8
"""The decoder's length is padded to a multiple of this, which suits matrix units and lets tensor
ranks divide it."""


class ModelConfig(Section):
    """A decoder (GPT) or an encoder-decoder (T5), in the usual variants."""

    name: str
    """Name of the model in the output of a run."""
    kind: Literal["gpt", "t5"]
    """Architecture: `gpt` is a decoder; `t5` is an encoder and a decoder that attends to its
    output."""
    layers: int = Field(ge=1)
    """Transformer layers; in an encoder-decoder the layers of both, those of the encoder first."""
    encoder_layers: int = Field(ge=0)
    """Layers of the encoder; null = none in a GPT, half of all layers in an encoder-decoder."""
    hidden: int = Field(ge=1)
    """Width of the residual stream."""
    heads: int = Field(ge=1)
    """Attention heads of the queries."""
    kv_heads: int = Field(ge=1)
    """Heads of keys and values; fewer than `heads` is grouped-query attention; null = `heads`."""
    head_dim: int = Field(ge=1)
    """Width of one head; null = hidden / heads."""
    ffn: int = Field(ge=1)
    """Inner width of the feed-forward block; null = 4 x hidden."""
    vocabulary: int = Field(ge=2)
    """Rows of the embedding, without padding. Padding is added if tensor ranks do not divide
    them."""
    positions: Literal["learned", "rotary", "relative"]
    """`learned`: a learned table; `rotary`: rotated queries and keys; `relative`: a learned number
    per head and distance, added to the attention scores."""
    rotary_base: int = Field(ge=1)
    """Base of the rotary wavelengths."""
    rotary_fraction: float = Field(gt=0, le=1)
    """Share of each head's dimensions that is rotated."""
    relative_buckets: int = Field(ge=2)
    """Number of buckets of distances that relative positions distinguish."""
    relative_distance: int = Field(ge=2)
    """Distance from which all larger distances share one bucket."""
    norm: Literal["layernorm", "rmsnorm"]
    """Normalisation before attention, before the feed-forward block and before the head."""
    norm_epsilon: float = Field(gt=0)
    """Number that the normalisation adds to the variance."""
    activation: Literal["gelu", "gelu_exact", "swiglu", "geglu"]
    """Non-linearity of the feed-forward block. swiglu and geglu are gated, with a third matrix.
    gelu and geglu approximate GELU with tanh; gelu_exact uses the error function."""
    residual: Literal["sequential", "parallel"]
    """`sequential`: the feed-forward block reads the output of attention; `parallel`: both read the
    same input."""
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
    """Standard deviation of a GPT's initial weights; the output matrices of branches get
    init_std / sqrt(2 layers). The deviations of a T5 follow from its dimensions and are multiplied
    by init_std, 1 as published."""

    @model_validator(mode="before")
    @classmethod
    def fill_derived_dimensions(cls, values: Any) -> Any:
        """Replace each null dimension by its value that follows from the others."""
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
        """Whether a layer attends to the encoder's output, as the decoder layers of a T5 do."""
        return 0 < self.encoder_layers <= layer
