"""Define the family T5Gemma, whose encoder and decoder have the dimensions of a Gemma 2 each.

The attributes of the classes are explained in base_family.py, and the rows of a table in table.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from frontier_lab.convert.base_family import Setting, Values
from frontier_lab.convert.gemma import WITHOUT_EFFECT, Gemma2
from frontier_llm.config.model import SIZES, ModelConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import DataError

_OF_T5GEMMA = {
    "encoder_window", "encoder_window_after", "start_token", *(f"encoder_{size}" for size in SIZES),
}  # fmt: skip
SIDES = "encoder", "decoder"
_OF_SIDES = {
    "cross_attention_hidden_size", "dropout_rate", "is_decoder", "bos_token_id",
    "attention_dropout", "classifier_dropout_rate",
}  # fmt: skip
"""Keys of a side whose values follow from the other keys, or are read for the whole model."""
_OF_MODEL = {"dropout_rate", "attention_dropout", "classifier_dropout_rate", "vocab_size"}


class T5Gemma(Gemma2):
    """T5Gemma (arXiv:2504.06225). The window of its encoder includes tokens on both sides."""

    name = "t5gemma"
    architecture = "T5GemmaForConditionalGeneration"
    copies: ClassVar[Mapping[str, str]] = {
        "lm_head.out_proj.weight": "model.decoder.embed_tokens.weight"
    }
    wants: ClassVar[Mapping[str, Any]] = {
        **{key: value for key, value in Gemma2.wants.items() if key not in _OF_T5GEMMA},
        "kind": "t5",
        "encoder_embedding": True,
    }
    of_model: ClassVar[frozenset[str]] = frozenset(_OF_MODEL)
    """Keys of config.json beside those of the sides."""
    settings: ClassVar[Sequence[Setting]] = (
        *Gemma2.settings,
        Setting("start_token", "bos_token_id", 2),
        Setting("dropout", "dropout_rate", 0.0),
    )

    tables: ClassVar[Mapping[str, str]] = {
        "encoder_embedding.tokens": "model.encoder.embed_tokens",
        "encoder_norm": "model.encoder.norm",
        "embedding.tokens": "model.decoder.embed_tokens",
        "final_norm": "model.decoder.norm",
        "head": "lm_head.out_proj",
    }
    encoder_layers, decoder_layers = "model.encoder.layers", "model.decoder.layers"
    modules: ClassVar[Mapping[str, str]] = {
        **Gemma2.modules,
        "attention_norm": "pre_self_attn_layernorm",
        "attention_output_norm": "post_self_attn_layernorm",
        "cross_attention_norm": "pre_cross_attn_layernorm",
        "cross_attention_output_norm": "post_cross_attn_layernorm",
        "cross_attention.query": "cross_attn.q_proj",
        "cross_attention.key_value": "cross_attn.{k,v}_proj",
        "cross_attention.output": "cross_attn.o_proj",
    }

    def to_theirs(self, config: RunConfig) -> Values:
        """Translate our configuration to an object for each side."""
        model, sides = config.model, dict[str, Any]()
        of_side = {"encoder": model.encoder_layers, "decoder": model.layers - model.encoder_layers}
        for name, layers in of_side.items():
            own = model.encoder if name == "encoder" else model
            side = own.model_copy(update={"layers": layers, "encoder_layers": 0})
            sides[name] = {
                **super().to_theirs(config.model_copy(update={"model": side})),
                "is_decoder": name == "decoder",
                "cross_attention_hidden_size": model.encoder.hidden,
            }
        whole = ("tie_word_embeddings", "vocab_size", "dropout_rate", "attention_dropout")
        return {
            **sides, **{key: sides["decoder"][key] for key in whole}, "is_encoder_decoder": True,
        }  # fmt: skip

    def to_ours(self, theirs: Values) -> Values:
        """Translate config.json. We count the layers of both sides together."""
        encoder, decoder = (super(T5Gemma, self).to_ours(self._side(theirs, n)) for n in SIDES)
        own = {"layers", "start_token", *SIZES}
        unequal = [key for key in encoder if encoder[key] != decoder[key] and key not in own]
        if unequal:
            key = unequal[0]
            raise DataError(
                f"config.json: {key} is {encoder[key]} in the encoder and {decoder[key]} in the "
                "decoder, which is not supported, only other sizes\n  do: our sides have one "
                f"{key}; nothing was written"
            )
        layers, window = encoder["layers"], encoder["window"]
        sizes = {s: encoder[s] if encoder[s] != decoder[s] else None for s in SIZES}
        return {
            **decoder,
            **{f"encoder_{size}": value for size, value in sizes.items()},
            "layers": layers + decoder["layers"],
            "encoder_layers": layers,
            **self.encoder_window(window),
        }

    def encoder_window(self, window: int | None) -> Values:
        """Return our settings of the encoder's window; theirs is the largest distance."""
        return {"encoder_window": window and window + 1, "encoder_window_after": None}

    def mismatches(self, model: ModelConfig) -> list[str]:
        """Return the reasons why our model does not belong to this family."""
        reasons = super().mismatches(model)
        for key, wanted in self.encoder_window(model.window).items():
            if (found := getattr(model, key)) != wanted:
                reasons.append(f"model.{key}={found}, not {wanted}")
        return reasons

    def refuse_variants(self, theirs: Values) -> None:
        """Refuse a model with a setting that our model cannot compute or does not know."""
        self.refuse_unknown(
            theirs, WITHOUT_EFFECT | {*SIDES, "tie_word_embeddings"} | self.of_model
        )
        for name in SIDES:
            side = {k: v for k, v in self._side(theirs, name).items() if k not in _OF_SIDES}
            super().refuse_variants(side)

    def _side(self, theirs: Values, name: str) -> Values:
        """Return the object of one side, with what the whole model has in common."""
        whole = {"tie_word_embeddings": True, "dropout_rate": 0.0, "attention_dropout": 0.0}
        return {**theirs[name], **{key: theirs.get(key, value) for key, value in whole.items()}}
