"""Define the families T5 1.1 and mT5, which have the same architecture.

The attributes of the classes are explained in base_family.py, and the rows of a table in table.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from frontier_lab.convert.base_family import PLAIN, Family, Setting, Values, query_key_value
from frontier_lab.convert.table import Row, split_heads, unfold
from frontier_llm.config.model import ModelConfig
from frontier_llm.config.run import RunConfig


class T5(Family):
    """T5 1.1: relative positions, RMS norm, gated GELU, no biases, an untied output head.

    transformers 5 ignores the key `tie_word_embeddings` of config.json. It ties the head to the
    embedding unless the folder contains a tensor for the head, so we always write this tensor.
    """

    name = "t5"
    architecture = "T5ForConditionalGeneration"
    copies: ClassVar[Mapping[str, str]] = {"coder.embed_tokens.weight": "shared.weight"}
    wants: ClassVar[Mapping[str, Any]] = {
        **PLAIN, "kind": "t5", "positions": "relative", "norm": "rmsnorm", "activation": "geglu",
        "bias": False, "qkv_bias": False, "tied": False, "scaled_attention": False,
    }  # fmt: skip
    settings = (
        Setting("vocabulary", "vocab_size"),
        Setting("hidden", "d_model"),
        Setting("head_dim", "d_kv"),
        Setting("ffn", "d_ff"),
        Setting("encoder_layers", "num_layers"),
        Setting("heads", "num_heads"),
        Setting("relative_buckets", "relative_attention_num_buckets", 32),
        Setting("relative_distance", "relative_attention_max_distance", 128),
        Setting("dropout", "dropout_rate", 0.1),
        Setting("norm_epsilon", "layer_norm_epsilon", 1e-6),
    )
    required: ClassVar[Mapping[str, Any]] = {
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": True,
    }
    written: ClassVar[Mapping[str, Any]] = {
        "tie_word_embeddings": False,
        "scale_decoder_outputs": False,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    }

    def rows(self, model: ModelConfig) -> Sequence[Row]:
        """Return the table.

        Our layers are numbered through encoder and decoder; theirs start at 0 in each of them.
        """
        first_decoder_layer = model.encoder_layers
        encoder = [
            *self._attention(model, "encoder"),
            *self._feed_forward("encoder.block.{n}.layer.1"),
        ]
        decoder = [
            *self._attention(model, "decoder"),
            *self._cross_attention(model),
            *self._feed_forward("decoder.block.{n}.layer.2"),
        ]
        bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        return [
            Row("embedding.tokens.weight", ("shared.weight",)),
            Row("encoder_positions.weight", (f"encoder.{bias}",)),
            *unfold(encoder, range(first_decoder_layer)),
            Row("encoder_norm.weight", ("encoder.final_layer_norm.weight",)),
            Row("decoder_positions.weight", (f"decoder.{bias}",)),
            *unfold(decoder, range(first_decoder_layer, model.layers), first=first_decoder_layer),
            Row("final_norm.weight", ("decoder.final_layer_norm.weight",)),
            Row("head.weight", ("lm_head.weight",)),
        ]

    def to_theirs(self, config: RunConfig) -> Values:
        """Translate our configuration. They count the decoder's layers separately."""
        model = config.model
        decoder = {"num_decoder_layers": model.layers - model.encoder_layers}
        return {**super().to_theirs(config), **decoder}

    def to_ours(self, theirs: Values) -> Values:
        """Translate config.json. We count the layers of encoder and decoder together."""
        ours = super().to_ours(theirs)
        encoder = ours["encoder_layers"]
        return {**ours, "layers": encoder + (theirs.get("num_decoder_layers") or encoder)}

    def _attention(self, model: ModelConfig, stack: str) -> list[Row]:
        """Return the rows of self-attention in the encoder or the decoder."""
        ours, theirs = "layers.{n}", f"{stack}.block.{{n}}.layer.0"
        return [
            Row(f"{ours}.attention_norm.weight", (f"{theirs}.layer_norm.weight",)),
            Row(
                f"{ours}.attention.qkv.weight",
                tuple(f"{theirs}.SelfAttention.{letter}.weight" for letter in "qkv"),
                query_key_value(model),
            ),
            Row(f"{ours}.attention.output.weight", (f"{theirs}.SelfAttention.o.weight",)),
        ]

    def _cross_attention(self, model: ModelConfig) -> list[Row]:
        ours, theirs = "layers.{n}", "decoder.block.{n}.layer.1"
        return [
            Row(f"{ours}.cross_attention_norm.weight", (f"{theirs}.layer_norm.weight",)),
            Row(f"{ours}.cross_attention.query.weight", (f"{theirs}.EncDecAttention.q.weight",)),
            Row(
                f"{ours}.cross_attention.key_value.weight",
                tuple(f"{theirs}.EncDecAttention.{letter}.weight" for letter in "kv"),
                split_heads(model.heads, (model.head_dim, model.head_dim)),
            ),
            Row(f"{ours}.cross_attention.output.weight", (f"{theirs}.EncDecAttention.o.weight",)),
        ]

    def _feed_forward(self, theirs: str) -> list[Row]:
        ours = "layers.{n}"
        return [
            Row(f"{ours}.ffn_norm.weight", (f"{theirs}.layer_norm.weight",)),
            Row(f"{ours}.ffn.gate.weight", (f"{theirs}.DenseReluDense.wi_0.weight",)),
            Row(f"{ours}.ffn.up.weight", (f"{theirs}.DenseReluDense.wi_1.weight",)),
            Row(f"{ours}.ffn.down.weight", (f"{theirs}.DenseReluDense.wo.weight",)),
        ]


class MT5(T5):
    """mT5: the same as T5 1.1 under another name."""

    name = "mt5"
    architecture = "MT5ForConditionalGeneration"
