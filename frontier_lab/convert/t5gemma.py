"""Define the family T5Gemma, whose encoder and decoder have the dimensions of a Gemma 2 each.

The attributes of the classes are explained in base_family.py, and the rows of a table in table.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from frontier_lab.convert.base_family import Setting, Values, query_key_value
from frontier_lab.convert.gemma import WITHOUT_EFFECT, Gemma2
from frontier_lab.convert.table import Row, split_heads, unfold
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

    def rows(self, model: ModelConfig) -> Sequence[Row]:
        """Return the table.

        Our layers are numbered through encoder and decoder; theirs start at 0 in each of them.
        """
        border = model.encoder_layers
        encoder = self._layer(model.encoder, "model.encoder.layers.{n}")
        decoder = self._layer(model, "model.decoder.layers.{n}") + self._cross_attention(model)
        return [
            Row("encoder_embedding.tokens.weight", ("model.encoder.embed_tokens.weight",)),
            *unfold(encoder, range(border)),
            Row("encoder_norm.weight", ("model.encoder.norm.weight",)),
            Row("embedding.tokens.weight", ("model.decoder.embed_tokens.weight",)),
            *unfold(decoder, range(border, model.layers), first=border),
            Row("final_norm.weight", ("model.decoder.norm.weight",)),
            Row("head.weight", ("lm_head.out_proj.weight",)),
        ]

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

    def _layer(self, model: ModelConfig, theirs: str) -> list[Row]:
        """Return the rows of a layer without cross-attention."""
        ours, qkv = "layers.{n}", (f"{theirs}.self_attn.{letter}_proj.weight" for letter in "qkv")
        return [
            *self._norms("attention", f"{theirs}.{{place}}_self_attn_layernorm.weight"),
            Row(f"{ours}.attention.qkv.weight", tuple(qkv), query_key_value(model)),
            Row(f"{ours}.attention.output.weight", (f"{theirs}.self_attn.o_proj.weight",)),
            *self._norms("ffn", f"{theirs}.{{place}}_feedforward_layernorm.weight"),
            *(
                Row(f"{ours}.ffn.{matrix}.weight", (f"{theirs}.mlp.{matrix}_proj.weight",))
                for matrix in ("gate", "up", "down")
            ),
        ]

    def _cross_attention(self, model: ModelConfig) -> list[Row]:
        ours, theirs = "layers.{n}.cross_attention", "model.decoder.layers.{n}"
        key_value = tuple(f"{theirs}.cross_attn.{letter}_proj.weight" for letter in "kv")
        widths = (model.head_dim, model.head_dim)
        return [
            *self._norms("cross_attention", f"{theirs}.{{place}}_cross_attn_layernorm.weight"),
            Row(f"{ours}.query.weight", (f"{theirs}.cross_attn.q_proj.weight",)),
            Row(f"{ours}.key_value.weight", key_value, split_heads(model.kv_heads, widths)),
            Row(f"{ours}.output.weight", (f"{theirs}.cross_attn.o_proj.weight",)),
        ]

    def _norms(self, branch: str, theirs: str) -> list[Row]:
        """Return the rows of the two norms of a branch; `theirs` has {place}."""
        places = {"norm": "pre", "output_norm": "post"}
        return [
            Row(f"layers.{{n}}.{branch}_{ours}.weight", (theirs.replace("{place}", place),))
            for ours, place in places.items()
        ]
