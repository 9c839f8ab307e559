"""Gemma 2 and Gemma 3 against transformers: logits of several lengths, and both ways bit by bit."""

import importlib
import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from frontier_lab.commands import convert as convert_checkpoint
from frontier_lab.convert.gemma import Gemma2, Gemma3
from frontier_lab.single_process_model import read_config, single_process_model
from frontier_llm.cli.options import run_command
from frontier_llm.errors import DataError
from tests.covering import covering
from tests.ranks import run_ranks
from tests.trainer.test_adaptation import outputs
from tests.values import tiny_values

# transformers loads weights in threads that it keeps
pytestmark = [pytest.mark.forked, pytest.mark.slow]

SIZES: dict[str, Any] = {
    "vocab_size": 151, "max_position_embeddings": 256, "hidden_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48,
    "query_pre_attn_scalar": 24, "sliding_window": 5,
}  # fmt: skip
LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
THEIRS = {
    "gemma2": ("Gemma2ForCausalLM", {
        **SIZES, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    }),
    "gemma3_text": ("Gemma3ForCausalLM", {**SIZES, "layer_types": LAYERS, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }}),
}  # fmt: skip


def convert(*arguments: str) -> None:
    assert run_command(partial(convert_checkpoint.main, [*arguments, "--no-check"])) == 0


@cache
def their_model(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a random model, whose norms and scores are large enough to tell."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    architecture, settings = THEIRS[kind]
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**settings, attn_implementation="eager")
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype)


def our_logits(folder: Path, tokens: torch.Tensor, **changes: Any) -> torch.Tensor:
    config = read_config(folder)
    model = config.model.model_copy(update=changes)
    config = config.model_copy(update={"model": model})
    with single_process_model(config, folder, torch.device("cpu")) as (built, _), torch.no_grad():
        logits: torch.Tensor = built.chunks[0].eval()(tokens=tokens)
        return logits[..., : model.vocabulary].float()


@pytest.mark.parametrize("kind", THEIRS)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path):
    theirs = their_model(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    convert("--from", "hf", str(tmp_path / "theirs"), str(tmp_path / "ours"))
    generator = torch.Generator().manual_seed(5)
    for length in (13, 7, 200):
        tokens = torch.randint(151, (2, length), generator=generator)
        with torch.no_grad():
            expected = theirs(input_ids=tokens, use_cache=False).logits
        assert expected.std() > 0.3
        ours = our_logits(tmp_path / "ours", tokens)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    controls: list[dict[str, Any]] = [
        {"window": 6}, {"window_every": 4}, {"scaled_embedding": False},
        {"zero_centred_norms": False}, {"score_width": None}, {"rotary_base": 10},
        {"norm_placement": "input"}, {"norm_placement": "output"},
    ]  # fmt: skip
    own: dict[str, list[dict[str, Any]]] = {
        "gemma2": [{"attention_softcap": None}, {"logit_softcap": None}],
        "gemma3_text": [{"rotary_local_base": 10000}, {"rotary_factor": 1.0}],
    }
    for change in controls + own[kind]:
        other = our_logits(tmp_path / "ours", tokens, **change)
        assert (other - expected).abs().max() > 0.1, change


@pytest.mark.parametrize("kind", covering(THEIRS, ["gemma2"]))
def test_the_factor_of_embeddings_is_rounded_to_bf16(kind: str, tmp_path: Path):
    theirs = their_model(kind, torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    convert("--from", "hf", str(tmp_path / "theirs"), str(tmp_path / "ours"))
    tokens = torch.arange(151)[None]
    read = []
    theirs.model.layers[0].register_forward_pre_hook(
        lambda _, args, options: read.append([*args, *options.values()][0]), with_kwargs=True
    )
    folder, device = tmp_path / "ours", torch.device("cpu")
    with (
        single_process_model(read_config(folder), folder, device) as (built, _),
        torch.no_grad(),
    ):
        theirs(input_ids=tokens, use_cache=False)
        chunk = built.chunks[0].bfloat16()
        ours = chunk._embed(chunk.embedding, [tokens], None).transpose(0, 1)
        table = chunk.embedding.word_embeddings.weight[:151]
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, read[0])
    unrounded = (table.float() * 32**0.5).bfloat16()
    assert not torch.equal(unrounded, read[0][0])


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}


def configs_of_round_trip(
    theirs: Any, dtype: str, folder: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert a model to ours and back, compare all weights, and return both configurations."""
    theirs.save_pretrained(folder / "theirs")
    convert("--from", "hf", str(folder / "theirs"), str(folder / "ours"))
    convert("--to", "hf", str(folder / "ours"), str(folder / "back"), "--dtype", dtype)
    before, after = (tensors_of(folder / name) for name in ("theirs", "back"))
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(before[name], tensor), name
    transformers = importlib.import_module("transformers")
    old, new = (
        transformers.AutoConfig.from_pretrained(folder / name).to_dict()
        for name in ("theirs", "back")
    )
    return old, new


@pytest.mark.parametrize("dtype", covering(["fp32", "bf16"], ["fp32"]))
@pytest.mark.parametrize("kind", THEIRS)
def test_theirs_comes_back_bit_by_bit(kind: str, dtype: str, tmp_path: Path):
    theirs = their_model(kind, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    old, new = configs_of_round_trip(theirs, dtype, tmp_path)
    settings = [*THEIRS[kind][1], "rope_parameters", "layer_types", "tie_word_embeddings"]
    assert {key: new[key] for key in settings} == {key: old[key] for key in settings}


@pytest.mark.parametrize(
    ("family", "change"),
    [
        (Gemma2(), {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        (Gemma2(), {"moe_experts": 4}),
        (Gemma2(), {"hidden_activation": "silu"}),
        (Gemma3(), {"use_bidirectional_attention": True}),
        (Gemma3(), {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}),
        (Gemma3(), {"rope_parameters": {"rope_type": "default"}}),
    ],
)
def test_what_ours_does_not_compute_is_refused(family: Any, change: dict[str, Any]):
    theirs = {**SIZES, "rms_norm_eps": 1e-6}
    family.refuse_variants(theirs)
    family.to_ours(theirs)

    def read() -> None:
        family.refuse_variants(theirs | change)
        family.to_ours(theirs | change)

    with pytest.raises(DataError, match="not supported"):
        read()


def test_released_files_of_gemma_3_name_rotary_positions_otherwise():
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 3,
           "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}  # fmt: skip
    Gemma3().refuse_variants({**SIZES, **old})
    ours = Gemma3().to_ours({**SIZES, **old})
    expected = {"rotary_base": 1e6, "rotary_local_base": 1e4, "rotary_factor": 8.0,
                "rotary_scaling": "linear", "window_every": 3}  # fmt: skip
    assert {key: ours[key] for key in expected} == expected
    assert json.loads(json.dumps(ours)) == ours


def test_an_encoder_decoder_begins_with_a_converted_gemma_2(tmp_path: Path):
    """Without cross-attention its logits are those of transformers, and so is a causal encoder."""
    theirs, folder = their_model("gemma2"), tmp_path / "ours"
    theirs.save_pretrained(tmp_path / "theirs")
    convert("--from", "hf", str(tmp_path / "theirs"), str(folder))
    sizes = dict(zip(("layers", "encoder_layers", "head_dim", "ffn"), (8, 4, 16, 48), strict=True))
    sizes |= {"vocabulary": 151, "kv_heads": 2, "score_width": 24, "window": 5, "encoder_window": 5}
    words = [f"model.{key}={value}" for key, value in sizes.items()]
    words += ["model.attention_softcap=2", "model.logit_softcap=3", "data=stdlib_spans"]
    values = tiny_values("model=t5gemma_tiny", *words)
    ours = run_ranks(outputs, 1, values, folder)[0]
    with torch.no_grad():
        found = theirs(ours["tokens"], output_hidden_states=True)
    torch.testing.assert_close(ours["logits"][..., :151], found.logits, rtol=0, atol=1e-5)
    encoded = ours["encoder"].transpose(0, 1)
    torch.testing.assert_close(encoded, found.hidden_states[-1], rtol=1e-5, atol=1e-5)
