"""Define the families T5 1.1 and mT5, which have the same architecture.

The attributes of the classes are explained in base_family.py, and the rows of a table in table.py.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from frontier_lab.convert.base_family import PLAIN, Family, Setting, Values
from frontier_llm.config.run import RunConfig

_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias"


def _feed_forward(place: int) -> dict[str, str]:
    """Return their names of the modules of the block that is at a place of a layer."""
    return {
        "ffn_norm": f"layer.{place}.layer_norm",
        "ffn.gate": f"layer.{place}.DenseReluDense.wi_0",
        "ffn.up": f"layer.{place}.DenseReluDense.wi_1",
        "ffn.down": f"layer.{place}.DenseReluDense.wo",
    }


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

    tables: ClassVar[Mapping[str, str]] = {
        "embedding.tokens": "shared",
        "encoder_positions": f"encoder.{_BIAS}",
        "encoder_norm": "encoder.final_layer_norm",
        "decoder_positions": f"decoder.{_BIAS}",
        "final_norm": "decoder.final_layer_norm",
        "head": "lm_head",
    }
    encoder_layers, decoder_layers = "encoder.block", "decoder.block"
    modules: ClassVar[Mapping[str, str]] = {
        "attention_norm": "layer.0.layer_norm",
        "attention.qkv": "layer.0.SelfAttention.{q,k,v}",
        "attention.output": "layer.0.SelfAttention.o",
        "cross_attention_norm": "layer.1.layer_norm",
        "cross_attention.query": "layer.1.EncDecAttention.q",
        "cross_attention.key_value": "layer.1.EncDecAttention.{k,v}",
        "cross_attention.output": "layer.1.EncDecAttention.o",
        **_feed_forward(2),
    }
    encoder_modules: ClassVar[Mapping[str, str]] = _feed_forward(1)

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


class MT5(T5):
    """mT5: the same as T5 1.1 under another name."""

    name = "mt5"
    architecture = "MT5ForConditionalGeneration"
