"""The model: its dimensions and the parts it is made of."""

from typing import Any, Literal

from pydantic import Field, model_validator

from frontier_llm.config.section import Section


class ModelConfig(Section):
    """A decoder-only transformer (GPT), in any of the field's usual variants."""

    name: str
    """What the run calls this model."""
    kind: Literal["gpt"]
    """Architecture family."""
    layers: int = Field(ge=1)
    """Transformer layers."""
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
    positions: Literal["learned", "rotary"]
    """How positions enter: a learned table, or rotated queries and keys."""
    rotary_base: int = Field(ge=1)
    """Base of the rotary wavelengths."""
    rotary_fraction: float = Field(gt=0, le=1)
    """Share of each head that is rotated."""
    norm: Literal["layernorm", "rmsnorm"]
    """Normalisation before attention, feed-forward block and head."""
    norm_epsilon: float = Field(gt=0)
    """Added to the variance."""
    activation: Literal["gelu", "swiglu"]
    """Non-linearity of the feed-forward block; swiglu is gated and has a third matrix."""
    bias: bool
    """Whether linear layers have biases."""
    tied: bool
    """Whether the head shares the embedding's matrix."""
    dropout: float = Field(ge=0, lt=1)
    """Dropout on the embedding and on the residual branches."""
    attention_dropout: float = Field(ge=0, lt=1)
    """Dropout on the attention probabilities."""
    init_std: float = Field(gt=0)
    """Standard deviation of the initial weights; outputs of branches get std / sqrt(2 layers)."""

    @model_validator(mode="before")
    @classmethod
    def fill_derived_dimensions(cls, values: Any) -> Any:
        """Replace each null dimension by what follows from the others."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        hidden, heads = values.get("hidden"), values.get("heads")
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
        return self.activation == "swiglu"
