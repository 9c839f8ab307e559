"""The section `model`: dimensions and variants of the model."""

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from frontier_llm.config.section import Section

DECODER_MULTIPLE = 8
"""The length of a T5's decoder is padded to a multiple of this many tokens. Such lengths suit the
matrix units of GPUs, and sequence parallelism can divide them between 2, 4 or 8 tensor ranks."""
SIZES = ("hidden", "heads", "kv_heads", "head_dim", "ffn")
"""Dimensions of which the encoder may have others than the decoder (`encoder_hidden`, ...)."""


class ModelConfig(Section):
    """A decoder (GPT) or an encoder-decoder (T5), in the usual variants."""

    name: str
    """Name of the model in the output of a run."""
    kind: Literal["gpt", "t5"]
    """Architecture. `gpt`: a decoder; `t5`: an encoder, and a decoder that attends to the output of
    the encoder."""
    layers: int = Field(ge=1)
    """Number of transformer layers; in an encoder-decoder, of encoder and decoder together."""
    encoder_layers: int = Field(ge=0)
    """Number of layers of the encoder; null = none in a GPT, half of all layers in an
    encoder-decoder."""
    hidden: int = Field(ge=1)
    """Width of the residual stream."""
    heads: int = Field(ge=1)
    """Number of attention heads of queries."""
    kv_heads: int = Field(ge=1)
    """Number of attention heads of keys and values; null = `heads`. Fewer than `heads` means
    grouped-query attention."""
    head_dim: int = Field(ge=1)
    """Width of one head; null = hidden / heads."""
    ffn: int = Field(ge=1)
    """Inner width of the feed-forward block; null = 4 x hidden."""
    encoder_hidden: int | None = Field(default=None, ge=1)
    """Width of the encoder's residual stream, if it has an embedding of its own; null = as hidden.
    Cross-attention has the decoder's heads, and keys and values of this width as inputs."""
    encoder_heads: int | None = Field(default=None, ge=1)
    """Number of attention heads of queries in the encoder; null = as heads."""
    encoder_kv_heads: int | None = Field(default=None, ge=1)
    """Number of attention heads of keys and values in the encoder; null = as kv_heads."""
    encoder_head_dim: int | None = Field(default=None, ge=1)
    """Width of one head in the encoder; null = as head_dim."""
    encoder_ffn: int | None = Field(default=None, ge=1)
    """Inner width of the feed-forward block in the encoder; null = as ffn."""
    vocabulary: int = Field(ge=2)
    """Number of tokens, which are rows of the embedding. Rows are added as padding if tensor ranks
    do not divide this number."""
    positions: Literal["learned", "rotary", "relative"]
    """Position encoding. `learned`: a learned table; `rotary`: rotated queries and keys;
    `relative`: a learned number per head and distance, which is added to the attention scores."""
    rotary_base: int = Field(ge=1)
    """Base of the rotary wavelengths."""
    rotary_fraction: float = Field(gt=0, le=1)
    """Share of the dimensions of each head that is rotated."""
    rotary_local_base: int | None = Field(default=None, ge=1)
    """Base of the rotary wavelengths of layers with a window, which are not stretched, as in
    Gemma 3; null = these layers are like the others."""
    rotary_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """How rotary wavelengths are stretched for samples that are longer than those of an earlier
    training. `linear`: all by the same factor; `llama3`: as in Llama 3.1; `yarn`: YaRN."""
    rotary_factor: float = Field(default=1.0, ge=1)
    """Factor by which the longest wavelengths are stretched."""
    rotary_original_length: int | None = Field(default=None, ge=1)
    """Tokens per sample of the earlier training; null = no scaling."""
    rotary_slow_turns: float = Field(default=1.0, gt=0)
    """A wavelength is stretched by the whole factor if it makes fewer turns than this within
    rotary_original_length."""
    rotary_fast_turns: float = Field(gt=0)
    """A wavelength is not stretched if it makes more turns than this within rotary_original_length;
    null = 32 with yarn, otherwise 4."""
    rotary_attention_factor: float | None = Field(default=None, gt=0)
    """Factor of rotated queries and of rotated keys with yarn; null = 0.1 ln(rotary_factor) + 1."""
    relative_buckets: int = Field(ge=2)
    """Number of groups (buckets) of distances that relative positions distinguish."""
    relative_distance: int = Field(ge=2)
    """Distance in tokens above which all distances share one bucket."""
    norm: Literal["layernorm", "rmsnorm"]
    """Normalisation of each residual branch (see norm_placement), and before the head."""
    norm_placement: Literal["input", "output", "both"] = "input"
    """What the norm of a residual branch normalises. `input`: the input of attention and of the
    feed-forward block; `output`: their output before it is added to the residual stream, as in
    OLMo 2; `both`: a norm for each of the two, as in Gemma 2."""
    zero_centred_norms: bool = False
    """Whether RMSNorm multiplies by 1 + weight, where weights start at 0, as in Gemma. Weight decay
    of norms (optimizer.decayed) then moves the factors towards 1, not 0."""
    qk_norm: Literal["none", "head", "width"] = "none"
    """RMSNorm of queries and keys before they are rotated. `head`: over each head, with the same
    weights for all heads, as in Qwen 3; `width`: over all heads together, as in OLMo 2."""
    norm_epsilon: float = Field(gt=0)
    """Small number that normalisation adds to the variance."""
    activation: Literal["gelu", "gelu_exact", "swiglu", "geglu"]
    """Activation function of the feed-forward block. swiglu and geglu are gated and have a third
    matrix. gelu and geglu approximate GELU with tanh; gelu_exact uses the error function."""
    residual: Literal["sequential", "parallel"]
    """Input of the feed-forward block. `sequential`: the output of attention; `parallel`: the same
    input as attention."""
    bias: bool
    """Whether linear layers have biases."""
    qkv_bias: bool
    """Whether the projections to queries, keys and values have biases; null = as `bias`. True with
    bias=false gives the model only these biases, as in Qwen 2."""
    tied: bool
    """Whether the head and the embedding share one matrix. A T5 then divides the input of the head
    by sqrt(hidden), unless embeddings are multiplied by it (scaled_embedding)."""
    cross_attention: Literal["separate", "merged"] = "separate"
    """How a decoder reads the encoder's output. `separate`: by an attention of its own; `merged`:
    by its self-attention, whose keys are both the decoder's tokens and, not rotated and without a
    window, those of the encoder, as in T5Gemma 2."""
    encoder_embedding: bool = False
    """Whether the encoder has an embedding of its own, as in T5Gemma; otherwise encoder and decoder
    share one. The head is tied to the embedding of the decoder."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the square root of `hidden`, as in Gemma."""
    dropout: float = Field(ge=0, lt=1)
    """Dropout on the embedding and on the residual branches."""
    attention_dropout: float = Field(ge=0, lt=1)
    """Dropout on the attention probabilities."""
    scaled_attention: bool
    """Whether attention scores are divided by the square root of head_dim."""
    score_width: float | None = Field(default=None, gt=0)
    """Number by whose square root attention scores are divided; null = head_dim. Some sizes of
    Gemma use hidden / heads instead."""
    window: int | None = Field(default=None, ge=1)
    """Sliding window in tokens: a token attends to itself, to the window - 1 tokens before it, and
    in an encoder to as many after it. null = to all tokens."""
    encoder_window: int | None = Field(default=None, ge=1)
    """Sliding window of the encoder's layers, if it is another one: T5Gemma's has one token more on
    each side than that of its decoder; null = as window."""
    encoder_window_after: int | None = Field(default=None, ge=1)
    """Tokens of the encoder's window from a token on, itself included, if they are another number
    than up to it, as in T5Gemma 2; null = as many."""
    window_every: int = Field(default=1, ge=1)
    """Layers with a window. 1 = every layer; k = all layers except each k-th one of the encoder and
    of the decoder, as in Gemma."""
    attention_softcap: float | None = Field(default=None, gt=0)
    """Bound c of the attention scores, which become c * tanh(score / c). null = none."""
    logit_softcap: float | None = Field(default=None, gt=0)
    """Bound c of the logits, which become c * tanh(logit / c), as in Gemma 2. null = none."""
    start_token: int = Field(default=0, ge=0)
    """Token that the decoder of an encoder-decoder reads first: 0, as in T5, or 2 in T5Gemma."""
    init_std: float = Field(gt=0)
    """Standard deviation of the initial weights of a GPT. The output matrices of attention and of
    feed-forward blocks get init_std / sqrt(2 layers). In a T5 the deviations follow from the
    dimensions and are multiplied by init_std; 1 gives the published deviations."""
    mup_base_hidden: int | None = Field(default=None, ge=1)
    """Width of the model for which the learning rate was found, to scale a GPT by muP; null = no
    muP. The model of this width is the same with and without muP."""
    mup_base_head_dim: int | None = Field(default=None, ge=1)
    """Width of a head of that model, which muP needs too: `head_dim`, if the number of heads grows
    with the width."""

    @model_validator(mode="before")
    @classmethod
    def fill_derived_dimensions(cls, values: Any) -> Any:
        """Replace each null dimension by the value that follows from the other dimensions."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        hidden, heads = values.get("hidden"), values.get("heads")
        layers = values.get("layers")
        if isinstance(layers, int) and values.get("encoder_layers") is None:
            values["encoder_layers"] = layers // 2 if values.get("kind") == "t5" else 0
        if values.get("qkv_bias") is None:
            values["qkv_bias"] = values.get("bias")
        if values.get("rotary_fast_turns") is None:
            values["rotary_fast_turns"] = 32.0 if values.get("rotary_scaling") == "yarn" else 4.0
        if isinstance(hidden, int) and values.get("ffn") is None:
            values["ffn"] = 4 * hidden
        if isinstance(heads, int) and heads > 0:
            if values.get("kv_heads") is None:
                values["kv_heads"] = heads
            if isinstance(hidden, int) and values.get("head_dim") is None:
                values["head_dim"] = max(1, hidden // heads)
        return values

    @property
    def encoder(self) -> "ModelConfig":
        """The same model with the dimensions of its encoder in place of those of its decoder."""
        own = {size: value for size in SIZES if (value := getattr(self, f"encoder_{size}"))}
        return self.model_copy(update=own) if own else self

    def side(self, layer: int) -> "ModelConfig":
        """Return the model with the dimensions of a layer, counted from 0."""
        return self.encoder if layer < self.encoder_layers else self

    @property
    def width_factor(self) -> float:
        """Width of muP's base model divided by the width of this model; 1 without muP."""
        return (self.mup_base_hidden or self.hidden) / self.hidden

    @property
    def head_factor(self) -> float:
        """Factor of the input of the head: that of muP, or of a T5 whose embedding is the head."""
        if self.kind == "t5" and self.tied and not self.scaled_embedding:
            return 1 / math.sqrt(self.hidden)  # T5, arXiv:1910.10683, in the authors' code
        return self.width_factor

    @property
    def softmax_scale(self) -> float | None:
        """Factor of the attention scores; None = 1 / sqrt(head_dim).

        With muP it is 1 / head_dim times a constant, such that it is 1 / sqrt(head_dim) in the base
        model.
        """
        if self.mup_base_head_dim is not None:
            return math.sqrt(self.mup_base_head_dim) / self.head_dim
        if self.score_width is not None:
            return 1 / math.sqrt(self.score_width)
        return None if self.scaled_attention else 1.0

    @property
    def rotated_width(self) -> int:
        """Number of rotated dimensions of each head."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def gated(self) -> bool:
        """Whether the feed-forward block multiplies by a gate."""
        return {"gelu": False, "gelu_exact": False, "swiglu": True, "geglu": True}[self.activation]

    def layer_window(self, layer: int) -> int | None:
        """Return the window of a layer, counted from 0; None = the layer has no window."""
        in_encoder = layer < self.encoder_layers
        number = layer + 1 - (0 if in_encoder else self.encoder_layers)
        window = self.encoder_window if in_encoder and self.encoder_window else self.window
        return window if self.window_every == 1 or number % self.window_every else None

    def layer_bounds(self, layer: int) -> tuple[int | None, int | None]:
        """Return the keys up to a query and from it on that a layer reads; None = all of them.

        The query's own key counts in both.
        """
        window = self.layer_window(layer)
        if layer >= self.encoder_layers:
            return window, 1
        return window, window and (self.encoder_window_after or window)

    def merges_attention(self, layer: int) -> bool:
        """Whether the self-attention of a layer also reads the output of the encoder."""
        is_merged = {"separate": False, "merged": True}[self.cross_attention]
        return is_merged and self.reads_encoder(layer)

    def reads_encoder(self, layer: int) -> bool:
        """Whether a layer attends to the output of the encoder, as decoder layers of a T5 do."""
        return 0 < self.encoder_layers <= layer
