"""Define the family T5Gemma 2, whose encoder and decoder are those of a Gemma 3 each; text only.

The attributes of the classes are explained in base_family.py, and the rows of a table in table.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from frontier_lab.convert.base_family import Setting, Values
from frontier_lab.convert.gemma import WITHOUT_EFFECT, Gemma3
from frontier_lab.convert.t5gemma import SIDES, T5Gemma
from frontier_llm.config.run import RunConfig

_TABLE = "model.encoder.embed_tokens"
"""Files have these names; the modules of transformers have `text_model` in those of the encoder."""
_OF_IMAGES = {
    "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index",
    "image_token_index",
}  # fmt: skip
"""Keys that concern images alone."""


class T5Gemma2(T5Gemma, Gemma3):
    """T5Gemma 2 (arXiv:2512.14856): merged attention, and one table for both sides and the head."""

    name = "t5gemma2"
    architecture = "T5Gemma2ForConditionalGeneration"
    copies: ClassVar[Mapping[str, str]] = {
        "lm_head.out_proj.weight": f"{_TABLE}.weight",
        "decoder.embed_tokens.weight": f"{_TABLE}.weight",
        "decoder.embed_tokens.eoi_embedding": f"{_TABLE}.eoi_embedding",
    }
    carried: ClassVar[tuple[str, ...]] = ("vision_tower", "multi_modal_projector", "eoi_embedding")
    wants: ClassVar[Mapping[str, Any]] = {
        **{key: value for key, value in T5Gemma.wants.items() if key != "rotary_local_base"},
        "qk_norm": "head",
        "cross_attention": "merged",
        "encoder_embedding": False,
        "encoder_hidden": None,
        "attention_softcap": None,
        "tied": True,
    }
    settings: ClassVar[Sequence[Setting]] = (
        *(s for s in Gemma3.settings if s.ours not in ("attention_softcap", "tied")),
        *(s for s in T5Gemma.settings if s.ours in ("start_token", "dropout")),
    )
    required: ClassVar[Mapping[str, Any]] = {
        **Gemma3.required,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": None,  # theirs is not read
    }
    of_model: ClassVar[frozenset[str]] = T5Gemma.of_model | _OF_IMAGES

    tables: ClassVar[Mapping[str, str]] = {**T5Gemma.tables, "embedding.tokens": _TABLE}
    modules: ClassVar[Mapping[str, str]] = {
        **T5Gemma.modules,
        "attention.query": "self_attn.q_proj",
        "attention.key_value": "self_attn.{k,v}_proj",
    }

    def to_theirs(self, config: RunConfig) -> Values:
        """Translate our configuration; the encoder's text has an object of its own."""
        theirs = super().to_theirs(config)
        for name in SIDES:
            for key in ("is_decoder", "cross_attention_hidden_size"):
                del theirs[name][key]
        return {**theirs, "encoder": {"text_config": theirs["encoder"]}}

    def carried_settings(self, theirs: Values) -> Values:
        """Return the part of config.json that is about images."""
        encoder = {key: value for key, value in theirs["encoder"].items() if key in _OF_IMAGES}
        return {**{key: theirs[key] for key in _OF_IMAGES & theirs.keys()}, "encoder": encoder}

    def encoder_window(self, window: int | None) -> Values:
        """Return our settings of the encoder's window, which theirs divides between both sides."""
        keys = "encoder_window", "encoder_window_after"
        sides = (None, None) if window is None else ((window + 1) // 2, window // 2 + 1)
        return dict(zip(keys, sides, strict=True))

    def refuse_variants(self, theirs: Values) -> None:
        """Refuse a model with a setting that our model cannot compute or does not know."""
        super().refuse_variants(theirs)
        known = WITHOUT_EFFECT | self.of_model | {"text_config", "tie_word_embeddings"}
        self.refuse_unknown(theirs["encoder"], known)

    def _side(self, theirs: Values, name: str) -> Values:
        of_text = {**theirs, "encoder": theirs["encoder"]["text_config"]}
        return super()._side(of_text, name)
