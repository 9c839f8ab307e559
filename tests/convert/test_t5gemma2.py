"""T5Gemma 2 against transformers: logits with padding, and both ways bit by bit."""

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from frontier_lab.convert import carried
from frontier_lab.single_process_model import read_config
from frontier_llm.model import layer
from tests.convert.test_gemma import configs_of_round_trip, convert, tensors_of
from tests.convert.test_t5gemma import IMAGES, SIDE2, WHOLE2, our_logits
from tests.covering import covering

# transformers loads weights in threads that it keeps
pytestmark = [pytest.mark.forked, pytest.mark.slow]


@cache
def their_model(dtype: torch.dtype = torch.float32) -> Any:
    """Return a random model, whose norms and scores are large enough to tell."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.T5Gemma2Config(**WHOLE2, attn_implementation="eager")
    model = transformers.T5Gemma2ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype)


def converted(folder: Path) -> Path:
    """Save their model in a folder, and convert it to ours in another."""
    their_model().save_pretrained(folder / "theirs")
    convert("--from", "hf", str(folder / "theirs"), str(folder / "ours"))
    return folder / "ours"


def example(source: int, target: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return inputs of ours, whose second sample has padding, and their logits."""
    generator = torch.Generator().manual_seed(source)
    encoder_tokens, tokens = (
        torch.randint(1, 148, (2, n), generator=generator) for n in (source, target)
    )
    is_token = torch.arange(source) < torch.tensor([[source], [source - 3]])
    with torch.no_grad():
        expected = their_model()(
            input_ids=encoder_tokens,
            attention_mask=is_token.long(),
            decoder_input_ids=tokens,
            decoder_attention_mask=torch.ones_like(tokens),
            use_cache=False,
        ).logits
    assert expected.std() > 0.3
    inputs = {"tokens": tokens, "encoder_tokens": encoder_tokens, "encoder_mask": is_token}
    return inputs, expected


CONTROLS: list[dict[str, Any]] = [
    {"encoder_window": 4}, {"encoder_window_after": 3}, {"encoder_window_after": None},
    {"encoder_window": 6, "encoder_window_after": None}, {"window": 5}, {"window_every": 2},
    {"score_width": None}, {"scaled_embedding": False}, {"rotary_local_base": 10000},
    {"rotary_factor": 1.0}, {"logit_softcap": None}, {"zero_centred_norms": False},
    {"norm_placement": "input"}, {"norm_placement": "output"},
]  # fmt: skip


def test_logits_are_those_of_transformers(tmp_path: Path):
    folder = converted(tmp_path)
    for source, target in ((7, 13), (13, 7), (200, 64), (40, 200)):
        inputs, expected = example(source, target)
        torch.testing.assert_close(our_logits(folder, inputs), expected, rtol=0, atol=1e-5)
    for change in CONTROLS:
        other = our_logits(folder, inputs, **change)
        assert (other - expected).abs().max() > 0.1, change


def test_a_model_that_rotates_keys_of_the_encoder_is_another_one(tmp_path: Path):
    inputs, expected = example(64, 64)
    folder = converted(tmp_path)
    rotate, heads = layer.rotate, layer.Attention.heads

    def rotated(self: Any, hidden: Any, angles: Any = None, context: Any = None) -> Any:
        query, key, value = heads(self, hidden, angles, context)
        if context is not None:
            key = torch.cat([rotate(key[:64], key[:64], angles)[0], key[64:]])
        return query, key, value

    with patch.object(layer.Attention, "heads", rotated):
        other = our_logits(folder, inputs)
    torch.testing.assert_close(our_logits(folder, inputs), expected, rtol=0, atol=1e-5)
    assert (other - expected).abs().max() > 0.1


@pytest.mark.parametrize("dtype", covering(["fp32", "bf16"], ["fp32"]))
def test_theirs_comes_back_bit_by_bit(dtype: str, tmp_path: Path, capsys: Any):
    theirs = their_model({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    old, new = configs_of_round_trip(theirs, dtype, tmp_path)
    config = read_config(tmp_path / "ours").model
    assert (config.layers, config.encoder_layers, config.start_token) == (7, 4, 7)
    assert (config.encoder_window, config.encoder_window_after) == (3, 4)
    assert "tensors are kept as they are" in capsys.readouterr().out
    keys = {*SIDE2, "rope_parameters", "layer_types", "rms_norm_eps", "attn_logit_softcapping"}
    for path in (("encoder", "text_config"), ("decoder",)):
        before, after = old, new
        for name in path:
            before, after = before[name], after[name]
        assert {k: after[k] for k in keys} == {k: before[k] for k in keys}
    for key in (*IMAGES, "mm_tokens_per_image", "vision_config"):
        assert new["encoder"][key] == old["encoder"][key]
    for key in ("vocab_size", "tie_word_embeddings", "image_token_index", "eoi_token_index"):
        assert new[key] == old[key]


def test_without_the_kept_file_tensors_of_text_are_written(tmp_path: Path):
    (converted(tmp_path) / carried.FILE).unlink()
    convert("--to", "hf", str(tmp_path / "ours"), str(tmp_path / "back"))
    names = set(tensors_of(tmp_path / "back"))
    assert names < set(tensors_of(tmp_path / "theirs"))
    assert not any("vision" in name or "eoi" in name for name in names)
