"""T5Gemma against transformers: logits with padding, both ways bit by bit, and published sizes."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from frontier_lab.convert.t5gemma import T5Gemma
from frontier_lab.convert.t5gemma2 import T5Gemma2
from frontier_lab.single_process_model import read_config, single_process_model
from frontier_llm.config.model import SIZES as MODEL_SIZES
from frontier_llm.errors import DataError
from tests.convert.test_gemma import LAYERS, SIZES, THEIRS, configs_of_round_trip, convert

# transformers loads weights in threads that it keeps
pytestmark = [pytest.mark.forked, pytest.mark.slow]

SIDE: dict[str, Any] = {**SIZES, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
SIDES = {
    "encoder": {**SIDE, "num_hidden_layers": 3, "bos_token_id": 5},
    "decoder": {**SIDE, "bos_token_id": 7},
}
"""The encoder has an odd number of layers: the pattern of windows starts again in the decoder."""
WHOLE = {**SIDES, "vocab_size": 151, "dropout_rate": 0.0}
UNEQUAL = {
    **SIDES,
    "encoder": {
        **SIDES["encoder"], "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3,
        "head_dim": 8, "intermediate_size": 80,
    },
}  # fmt: skip

SIDE2: dict[str, Any] = {
    **THEIRS["gemma3_text"][1], "num_key_value_heads": 1, "sliding_window": 6, "bos_token_id": 7,
    "final_logit_softcapping": 3.0,
}  # fmt: skip
DECODER2 = {**SIDE2, "num_hidden_layers": 3, "layer_types": LAYERS[:3]}
IMAGES = {"image_token_index": 148, "boi_token_index": 149, "eoi_token_index": 150}
VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28, "patch_size": 14,
}  # fmt: skip
ENCODER2 = {"text_config": SIDE2, "vision_config": VISION, "mm_tokens_per_image": 4, **IMAGES}
WHOLE2 = {"encoder": ENCODER2, "decoder": DECODER2, "image_token_index": 148}


@cache
def their_model(dtype: torch.dtype = torch.float32, *, equal: bool = True) -> Any:
    """Return a random model, whose norms and scores are large enough to tell."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    sides = SIDES if equal else UNEQUAL
    config = transformers.T5GemmaConfig(**sides, vocab_size=151, attn_implementation="eager")
    model = transformers.T5GemmaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype)


def our_logits(folder: Path, inputs: dict[str, torch.Tensor], **changes: Any) -> torch.Tensor:
    config = read_config(folder)
    model = config.model.model_copy(update=changes)
    config = config.model_copy(update={"model": model})
    with single_process_model(config, folder, torch.device("cpu")) as (built, _), torch.no_grad():
        logits: torch.Tensor = built.chunks[0].eval()(**inputs)
        return logits[..., : model.vocabulary]


CONTROLS: list[dict[str, Any]] = [
    {"norm_placement": "input"}, {"norm_placement": "output"}, {"zero_centred_norms": False},
    {"attention_softcap": None}, {"logit_softcap": None}, {"encoder_window": None},
    {"encoder_window": 7}, {"window": 6}, {"window_every": 4}, {"score_width": None},
    {"scaled_embedding": False}, {"encoder_embedding": False}, {"rotary_base": 10},
]  # fmt: skip


@pytest.mark.parametrize("equal", [True, False], ids=["equal sides", "unequal sides"])
def test_logits_are_those_of_transformers(tmp_path: Path, equal: bool):
    theirs = their_model(equal=equal)
    theirs.save_pretrained(tmp_path / "theirs")
    convert("--from", "hf", str(tmp_path / "theirs"), str(tmp_path / "ours"))
    generator = torch.Generator().manual_seed(5)
    for source, target in ((7, 13), (13, 7), (200, 64)):
        tokens, encoder_tokens = (
            torch.randint(151, (2, n), generator=generator) for n in (target, source)
        )
        is_token = torch.arange(source) < torch.tensor([[source], [source - 3]])
        with torch.no_grad():
            expected = theirs(
                input_ids=encoder_tokens,
                attention_mask=is_token.long(),
                decoder_input_ids=tokens,
                decoder_attention_mask=torch.ones_like(tokens),
                use_cache=False,
            ).logits
        assert expected.std() > 0.3
        inputs = {"tokens": tokens, "encoder_tokens": encoder_tokens, "encoder_mask": is_token}
        ours = our_logits(tmp_path / "ours", inputs)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    for change in CONTROLS if equal else CONTROLS[:4]:
        other = our_logits(tmp_path / "ours", inputs, **change)
        assert (other - expected).abs().max() > 0.1, change


@pytest.mark.parametrize(
    "equal",
    [pytest.param(True, marks=pytest.mark.exhaustive), False],
    ids=["equal sides", "unequal sides"],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_theirs_comes_back_bit_by_bit(dtype: str, equal: bool, tmp_path: Path):
    theirs = their_model({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype], equal=equal)
    old, new = configs_of_round_trip(theirs, dtype, tmp_path)
    config = read_config(tmp_path / "ours").model
    assert (config.layers, config.encoder_layers, config.start_token) == (7, 3, 7)
    for side in ("encoder", "decoder"):
        keys = {*SIDE, "rope_parameters", "layer_types", "is_decoder", "rms_norm_eps"}
        keys |= {"bos_token_id"} if side == "decoder" else set()
        assert {k: new[side][k] for k in keys} == {k: old[side][k] for k in keys}
    wanted = {
        size: None if equal else value
        for size, value in zip(MODEL_SIZES, (48, 6, 3, 8, 80), strict=True)
    }
    assert {size: getattr(config, f"encoder_{size}") for size in MODEL_SIZES} == wanted
    assert new["decoder"]["cross_attention_hidden_size"] == (32 if equal else 48)
    assert (new["vocab_size"], new["tie_word_embeddings"]) == (151, True)


FAMILIES = {"t5gemma": (T5Gemma, WHOLE, "encoder_window", 6),
            "t5gemma2": (T5Gemma2, WHOLE2, "encoder_window_after", 4)}  # fmt: skip
"""By name: the family, a configuration that is accepted, and a value that is read from it."""


@pytest.mark.parametrize(
    ("name", "change", "names"),
    [
        ("t5gemma", {"encoder": {**SIDE, "query_pre_attn_scalar": 48}},
         "score_width is 48 in the encoder"),
        ("t5gemma", {"decoder": {**SIDE, "sliding_window": 6}},
         "window is 5 in the encoder and 6 in the"),
        ("t5gemma", {"decoder": {**SIDE, "hidden_activation": "silu"}}, "hidden_activation='silu'"),
        ("t5gemma", {"encoder": {**SIDE, "experts": 4}}, "experts=4"),
        ("t5gemma", {"experts": 4}, "experts=4"),
        ("t5gemma",
         {"encoder": {**SIDE, "layer_types": ["full_attention", "sliding_attention"] * 2}},
         "layer_types"),
        ("t5gemma2",
         {"encoder": {**ENCODER2, "text_config": {**SIDE2, "query_pre_attn_scalar": 48}}},
         "score_width is 48 in the encoder"),
        ("t5gemma2", {"decoder": {**DECODER2, "hidden_activation": "silu"}},
         "hidden_activation='silu'"),
        ("t5gemma2", {"decoder": {**DECODER2, "attn_logit_softcapping": 5.0}},
         "attn_logit_softcapping=5.0"),
        ("t5gemma2", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ("t5gemma2", {"encoder": {**ENCODER2, "experts": 4}}, "experts=4"),
        ("t5gemma2", {"encoder": {**ENCODER2, "text_config": {**SIDE2, "experts": 4}}},
         "experts=4"),
        ("t5gemma2", {"experts": 4}, "experts=4"),
    ],
)  # fmt: skip
def test_what_ours_does_not_compute_is_refused(name: str, change: dict[str, Any], names: str):
    kind, theirs, key, value = FAMILIES[name]
    family = kind()
    family.refuse_variants(theirs)
    assert family.to_ours(theirs)[key] == value

    def read() -> None:
        family.refuse_variants(theirs | change)
        family.to_ours(theirs | change)

    with pytest.raises(DataError, match="not supported") as error:
        read()
    assert names in str(error.value)
