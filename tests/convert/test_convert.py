"""Weights to Hugging Face's form and back, proved by the logits of both models."""

import importlib
import json
import shlex
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from frontier_lab.commands import convert as convert_checkpoint
from frontier_lab.commands import evaluate, generate
from frontier_lab.convert import compare_logits
from frontier_lab.convert.decoders import Llama, Qwen3
from frontier_lab.convert.families import FAMILIES, family_for
from frontier_lab.convert.ours import OurWeights, write_weights
from frontier_lab.convert.table import TRANSPOSED
from frontier_llm.checkpoint.discovery import find
from frontier_llm.cli.compose import configured
from frontier_llm.cli.options import run_command
from frontier_llm.cli.train import configure
from frontier_llm.config import decode
from frontier_llm.data.sentencepiece_tokenizer import train_tokenizer
from frontier_llm.errors import ConfigError, DataError, FrontierError
from frontier_llm.geometry.inventory import model_shapes
from frontier_llm.saving import run_directory
from frontier_llm.saving.changes import check_initial_model, check_initial_tokenizer
from tests.convert.test_gemma import tensors_of
from tests.covering import covering
from tests.values import tiny_values

# transformers loads weights in threads that it keeps
pytestmark = [pytest.mark.forked, pytest.mark.slow]

ODD_VOCABULARY = 151
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": ODD_VOCABULARY, "n_positions": 24, "n_embd": 32, "n_layer": 3, "n_head": 4},
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        {
            "vocab_size": ODD_VOCABULARY, "max_position_embeddings": 24, "hidden_size": 32,
            "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
            "use_parallel_residual": False, "hidden_act": "gelu_new",
        },
    ),
    "llama": (
        "LlamaForCausalLM",
        {
            "vocab_size": ODD_VOCABULARY, "max_position_embeddings": 24, "hidden_size": 32,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 48, "rms_norm_eps": 1e-5,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": ODD_VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2,
            "num_decoder_layers": 3, "num_heads": 4, "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False, "dropout_rate": 0.0,
        },
    ),
}  # fmt: skip
THEIRS["gpt_neox parallel"] = (
    THEIRS["gpt_neox"][0],
    {**THEIRS["gpt_neox"][1], "use_parallel_residual": True, "hidden_act": "gelu"},
)
THEIRS["mt5"] = ("MT5ForConditionalGeneration", THEIRS["t5"][1])
LLAMA = THEIRS["llama"][1]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0,
          "high_freq_factor": 2.0, "original_max_position_embeddings": 12}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 64, "beta_fast": 16}  # fmt: skip
GEMMA_SIZES = {**LLAMA, "num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 24,
               "sliding_window": 5, "tie_word_embeddings": True}  # fmt: skip
THEIRS |= {
    "gpt_neox yarn": (THEIRS["gpt_neox"][0], {
        **THEIRS["gpt_neox"][1], "hidden_size": 64, "rope_parameters": YARN, "rotary_pct": 0.5,
    }),
    "llama tied llama3": ("LlamaForCausalLM", {
        **LLAMA, "tie_word_embeddings": True, "rope_parameters": LLAMA3,
    }),
    "mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", {**LLAMA, "rope_parameters": {**YARN, "attention_factor": 1.5}}),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 16}),
    "olmo2": ("Olmo2ForCausalLM", {**LLAMA, "rope_parameters": {"rope_theta": 5e5,
                                                                "rope_type": "default"}}),
    "gemma2": ("Gemma2ForCausalLM", GEMMA_SIZES),
    "t5gemma": ("T5GemmaForConditionalGeneration", {
        "encoder": GEMMA_SIZES, "decoder": {**GEMMA_SIZES, "num_hidden_layers": 3},
        "vocab_size": ODD_VOCABULARY,
    }),
    "t5gemma2": ("T5Gemma2ForConditionalGeneration", {
        "encoder": {"text_config": GEMMA_SIZES, "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28, "patch_size": 14,
        }, "mm_tokens_per_image": 4},
        "decoder": {**GEMMA_SIZES, "num_hidden_layers": 3},
    }),
    "gemma3_text": ("Gemma3ForCausalLM", {
        **GEMMA_SIZES, "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Convert; return the exit code of the process."""
    return run_command(partial(convert_checkpoint.main, arguments))


@pytest.fixture(scope="module", autouse=True)
def _their_code() -> None:
    """Import it before the forks, once for all of them."""
    with suppress(ImportError):  # the tests that need it say so
        transformers = importlib.import_module("transformers")
        for architecture, _ in THEIRS.values():
            getattr(transformers, architecture)


def random_model(architecture: str, settings: dict[str, Any]) -> Any:
    """Return a random model of theirs whose weights are large enough to tell."""
    torch.manual_seed(3)
    model_class = getattr(importlib.import_module("transformers"), architecture)
    model = model_class(model_class.config_class(**settings))
    if hasattr(model, "shared"):  # transformers 5 makes it tied; the released models are not
        model.lm_head = torch.nn.Linear(model.config.d_model, model.config.vocab_size, bias=False)
        model._tied_weights_keys.pop("lm_head.weight", None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def make_theirs(kind: str, folder: Path) -> Path:
    """Save a random model of theirs."""
    pytest.importorskip("transformers")
    random_model(*THEIRS[kind]).save_pretrained(folder)
    return folder


ALIKE = (
    "gemma2",
    "gemma3_text",
    "t5gemma",
    "t5",
    "qwen2",
    "mistral",
    "olmo2",
    "gpt_neox yarn",
    "llama",
)
"""Families with tests of their own, or that differ from another one in few settings."""


@pytest.mark.parametrize("kind", covering(THEIRS, ALIKE))
def test_theirs_becomes_ours_and_theirs_again(kind: str, tmp_path: Path, capsys):
    theirs = make_theirs(kind, tmp_path / "theirs")
    assert main(["--from", "hf", str(theirs), str(tmp_path / "ours")]) == 0
    assert "logits differ by at most" in capsys.readouterr().out
    assert main(["--to", "hf", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    before, after = tensors_of(theirs), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys() | {name for name in before if "embed_tokens" in name}
    for name, tensor in after.items():
        assert torch.equal(before[name], tensor), name
    assert not list(tmp_path.glob(".*"))


def make_ours(folder: Path, *overrides: str) -> Path:
    """Write a run directory of a random model of ours."""
    config = decode(values := tiny_values(*overrides))
    folder.mkdir()
    run_directory.write_config(folder, run_directory.to_yaml(values))
    shapes = model_shapes(config.model, config.data.sequence_length)
    generator = torch.Generator().manual_seed(1)
    tensors = [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]
    half = len(tensors) // 2
    write_weights(folder, [tensors[:half], tensors[half:]], {})
    return folder


GEMMA = ("model.ffn=48", "model.kv_heads=2", "model.head_dim=16")
VARIANTS = {
    "gpt2": ("model.vocabulary=129",),
    "gpt_neox": ("model.positions=rotary", "model.rotary_fraction=0.5", "model.tied=false"),
    "llama": ("model=llama_7b", "model.ffn=48", "model.kv_heads=2", "model.tied=true"),
    "mistral": ("model=llama_7b", "model.ffn=48", "model.window=7"),
    "qwen2": (
        "model=llama_7b",
        "model.qkv_bias=true",
        "model.rotary_scaling=yarn",
        "model.rotary_factor=2.5",
        "model.rotary_original_length=8",
        "model.rotary_attention_factor=1.5",
    ),
    "qwen3": (
        "model=llama_7b",
        "model.qk_norm=head",
        "model.head_dim=16",
        "model.rotary_scaling=llama3",
        "model.rotary_factor=8",
        "model.rotary_original_length=8",
        "model.rotary_slow_turns=2",
    ),
    "olmo2": ("model=llama_7b", "model.qk_norm=width", "model.norm_placement=output"),
    "gemma2": ("model=gemma2_2b", *GEMMA, "model.score_width=24", "model.window=9"),
    "gemma3_text": ("model=gemma3_4b", *GEMMA, "model.window=9", "model.score_width=24"),
    "t5gemma": (
        "model=t5gemma_s_s",
        "data=stdlib_spans",
        *GEMMA,
        "model.encoder_window=5",
        "model.window=4",
        "model.score_width=24",
    ),
    "t5gemma2": (
        "model=t5gemma2_tiny",
        "data=stdlib_spans",
        *GEMMA,
        "model.encoder_window=2",
        "model.encoder_window_after=3",
        "model.window=4",
        "model.score_width=24",
    ),
    "mt5": ("model=mt5_tiny", "model.encoder_layers=1", "model.ffn=48", "model.head_dim=8"),
}


@pytest.mark.parametrize("kind", VARIANTS)
def test_our_models_find_their_family_and_every_tensor_its_place(kind: str):
    config = decode(tiny_values(*VARIANTS[kind]))
    family = family_for(config.model, None)
    assert family.name == kind
    shapes = model_shapes(config.model, config.data.sequence_length)
    assert {row.ours for row in family.rows(config.model)} >= set(shapes)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_transform_comes_back(family: Any):
    kind = "mt5" if family.name == "t5" else family.name
    config = decode(tiny_values(*VARIANTS[kind]))
    shapes = model_shapes(config.model, config.data.sequence_length)
    for row in family.rows(config.model):
        if row.ours in shapes:
            ours = torch.randn(shapes[row.ours])
            theirs = row.transform.to_theirs(ours)
            assert len(theirs) == len(row.theirs)
            assert torch.equal(row.transform.to_ours(theirs), ours)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_setting_comes_back(family: Any):
    config = decode(tiny_values(*VARIANTS["mt5" if family.name == "t5" else family.name]))
    theirs = json.loads(json.dumps(family.to_theirs(config)))
    family.refuse_variants(theirs)
    for key, value in family.to_ours(theirs).items():
        section, _, field = key.rpartition(".")
        assert getattr(getattr(config, section or "model"), field) == value, key


@pytest.mark.parametrize(
    "form",
    [
        {"rope_parameters": {"rope_type": "dynamic"}},
        {"rope_scaling": {"type": "longrope", "factor": 2.0}},
        {"rope_scaling": 1},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}},
        {"rope_parameters": {"rope_type": "yarn", "truncate": False}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    ],
)
def test_other_rotary_positions_are_refused(form: dict[str, Any]):
    with pytest.raises(DataError, match=r"rope_.* is not supported"):
        Llama().refuse_variants(form)


def test_older_files_name_rotary_positions_otherwise():
    """As in the released files of Llama 3.1, and with the older name of the type."""
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "factor": 8.0,
           "original_max_position_embeddings": 8192}}  # fmt: skip
    sizes = {"vocab_size": 8, "max_position_embeddings": 131072, "hidden_size": 8,
             "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}  # fmt: skip
    Llama().refuse_variants({**sizes, **old})
    ours = Llama().to_ours({**sizes, **old})
    assert (ours["rotary_scaling"], ours["rotary_base"], ours["rotary_factor"]) == (
        "llama3", 5e5, 8.0,
    )  # fmt: skip
    assert (ours["rotary_slow_turns"], ours["rotary_fast_turns"]) == (1.0, 4.0)


def test_windows_in_some_layers_are_refused():
    values = tiny_values(*VARIANTS["mistral"], "model.window_every=2")
    with pytest.raises(DataError, match=r"mistral: model\.window_every=2, not 1"):
        family_for(decode(values).model, None)
    with pytest.raises(DataError, match="layer_types contains 'sliding_attention'"):
        Qwen3().refuse_variants({"layer_types": ["full_attention", "sliding_attention"]})


def test_many_shards_are_written_and_read(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("frontier_lab.commands.convert.SHARD_BYTES", 10_000)
    ours = make_ours(tmp_path / "ours")
    assert main(["--to", "hf", str(ours), str(tmp_path / "out"), "--no-check"]) == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert main(["--from", "hf", str(tmp_path / "out"), str(tmp_path / "back"), "--no-check"]) == 0
    before, after = OurWeights(ours), OurWeights(tmp_path / "back")
    assert len(list(find(tmp_path / "back").folder.glob("*.safetensors"))) > 3
    for name in before.checkpoint.manifest.tensors:
        assert torch.equal(before.read(name), after.read(name))


def test_a_wrong_transform_is_found_and_leaves_nothing(tmp_path: Path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    ours = make_ours(tmp_path / "ours")
    monkeypatch.setattr(
        "frontier_lab.convert.decoders.query_key_value",
        lambda model, joined: TRANSPOSED,  # heads left interleaved: the classic
    )
    assert main(["--to", "hf", str(ours), str(tmp_path / "out")]) == FrontierError.exit_code
    assert "converted model differs: logits differ by at most" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bloom"}, "model_type='bloom' is unknown here"),
        ({"activation_function": "relu"}, "activation_function='relu' is not supported"),
        ({"n_embd": None}, "config.json lacks 'n_embd'"),
        ({"n_head": 5}, "heads"),
        ({"embd_pdrop": 0.5}, "embd_pdrop=0.5 and resid_pdrop=0.0, but our dropout is one number"),
    ],
)
def test_what_ours_does_not_compute_is_refused(
    tmp_path: Path, capsys, change: dict[str, Any], message: str
):
    folder = their_gpt2(tmp_path)
    settings = json.loads((folder / "config.json").read_text()) | change
    settings = {key: value for key, value in settings.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(settings))
    assert main(["--from", "hf", str(folder), str(tmp_path / "out"), "--no-check"]) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("transformer.h.0.attn.q_norm.weight", "has no place in our model"),
        ("-transformer.ln_f.bias", "the model lacks transformer.ln_f.bias"),
    ],
)
def test_names_without_a_place_are_told(tmp_path: Path, capsys, name: str, message: str):
    folder = their_gpt2(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    if name.startswith("-"):
        del tensors[name[1:]]
    else:
        tensors[name] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors")
    assert main(["--from", "hf", str(folder), str(tmp_path / "out"), "--no-check"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert name.strip("-") in said


def test_the_modes_of_ul2_are_told_with_their_token_ids(tmp_path: Path, capsys):
    overrides = (*VARIANTS["mt5"], "data=stdlib_ul2")
    ours = make_ours(tmp_path / "ours", *overrides)
    last = decode(tiny_values(*overrides)).model.vocabulary - 1
    assert main(["--to", "hf", str(ours), str(tmp_path / "out"), "--no-check"]) == 0
    said = capsys.readouterr().out
    assert f": NLU is {last}, NLG is {last - 1}, S2S is {last - 2}; a text" in said
    assert "continued begins with S2S\n" in said


def test_released_gpt2_has_shorter_names(tmp_path: Path):
    folder = their_gpt2(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    mask = torch.ones(1, 1, 16, 16).tril()
    save_file(bare | {"h.0.attn.bias": mask}, folder / "model.safetensors")
    assert main(["--from", "hf", str(folder), str(tmp_path / "out"), "--no-check"]) == 0


def their_gpt2(tmp_path: Path, *overrides: str) -> Path:
    """A folder of theirs, made without transformers."""
    ours = make_ours(tmp_path / "made_of", *overrides)
    assert main(["--to", "hf", str(ours), str(tmp_path / "theirs"), "--no-check"]) == 0
    return tmp_path / "theirs"


def test_the_tokenizer_goes_along_both_ways(tmp_path: Path, capsys):
    theirs = their_gpt2(tmp_path)
    train_tokenizer(["def walk(tree):\n    yield tree\n" * 20], 300, theirs / "tokenizer.model")
    imported, back = tmp_path / "imported", tmp_path / "back"
    assert main(["--from", "hf", str(theirs), str(imported), "--no-check"]) == 0
    said = capsys.readouterr().out
    config = decode(run_directory.from_yaml((imported / "config.yaml").read_text()))
    assert config.model.name == "imported"
    assert config.data.tokenizer == str(imported / "tokenizer.model")
    assert f"run.init_from={imported} " in said
    assert f"data.tokenizer={imported / 'tokenizer.model'}" in said
    words = shlex.split(said.partition("frontier-llm train ")[2])
    printed = configured([*words, f"run.dir={tmp_path}/run"]).config
    assert printed.model == config.model  # the command makes the same model
    check_initial_tokenizer(printed, Path(str(printed.data.tokenizer)))
    check_initial_model(printed)
    for changed in ("model.layers=9", "model.norm_epsilon=0.1", "model.window=8"):
        other = configured([*words, f"run.dir={tmp_path}/run", changed]).config
        with pytest.raises(ConfigError, match=f"of run.init_from={imported}") as caught:
            check_initial_model(other)
        assert caught.value.key == changed.partition("=")[0]
    check_initial_model(configured([*words, "run.allow_changes=[model.window]", changed]).config)
    train_tokenizer(["the old man and the sea, " * 20], 300, tmp_path / "other.model")
    with pytest.raises(ConfigError, match=f"set data.tokenizer={imported} "):
        check_initial_tokenizer(printed, tmp_path / "other.model")
    assert main(["--to", "hf", str(imported), str(back), "--no-check"]) == 0
    written = [folder / "tokenizer.model" for folder in (theirs, imported, back)]
    assert len({file.read_bytes() for file in written}) == 1


def test_weights_without_a_tokenizer_get_no_other(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    imported, back = tmp_path / "imported", tmp_path / "back"
    assert main(["--from", "hf", str(their_gpt2(tmp_path)), str(imported), "--no-check"]) == 0
    said = capsys.readouterr().out
    assert "these weights have no tokenizer: write data.tokenizer=PATH" in said
    words = [*shlex.split(said.partition("frontier-llm train ")[2]), f"run.dir={tmp_path}/run"]
    printed = configured(words).config
    with pytest.raises(ConfigError, match=r"set data\.tokenizer=PATH") as caught:
        check_initial_tokenizer(printed, printed.data.known_tokenizer)
    assert f"run.init_from={imported} (which they do not record)" in str(caught.value)
    allowed = configured([*words, "run.allow_changes=[data.tokenizer]"]).config
    check_initial_tokenizer(allowed, allowed.data.known_tokenizer)
    train_tokenizer(["the old man and the sea, " * 20], 280, tmp_path / "given.model")
    check_initial_tokenizer(printed, tmp_path / "given.model")
    for command in (generate.main, evaluate.main):
        text = ["--text", __file__] if command is evaluate.main else ["a prompt"]
        assert run_command(lambda call=command, words=text: call([str(imported), *words])) == 2
        said = capsys.readouterr().err
        assert "does not record its tokenizer" in said
        assert "do:     convert them again from a folder with their tokenizer.json" in said
    assert main(["--to", "hf", str(imported), str(back), "--no-check"]) == 0
    assert not list(back.glob("token*"))
    assert not Path("corpora").exists(), "no corpus was prepared for a tokenizer"


def test_a_folder_of_converted_weights_is_no_run(tmp_path: Path, capsys):
    imported = tmp_path / "imported"
    assert main(["--from", "hf", str(their_gpt2(tmp_path)), str(imported), "--no-check"]) == 0
    words = shlex.split(capsys.readouterr().out.partition("frontier-llm train ")[2])
    with pytest.raises(ConfigError, match="a converted model") as caught:
        configure([*words[1:], f"run.dir={imported}"])
    assert f"run.init_from={imported}" in caught.value.todo


@pytest.mark.parametrize("vocabulary", covering([300, 299], [300]))
def test_an_imported_model_is_evaluated_on_given_texts_alone(
    vocabulary: int, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    theirs, imported = their_gpt2(tmp_path, f"model.vocabulary={vocabulary}"), tmp_path / "imported"
    text = "def walk(tree):\n    yield tree\n" * 20
    Path("text.py").write_text(text)
    train_tokenizer([text], 300, theirs / "tokenizer.model")
    assert main(["--from", "hf", str(theirs), str(imported), "--no-check"]) == 0
    capsys.readouterr()
    assert run_command(lambda: evaluate.main([str(imported)])) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "configuration error at --text"
    assert "add --text FILE" in said[-1]
    ended = run_command(lambda: evaluate.main([str(imported), "--text", "text.py"]))
    if vocabulary < 300:  # the tokenizer has more tokens
        assert ended == 2
        assert "model.vocabulary" in capsys.readouterr().err
    else:
        assert ended == 0
        assert "text.py" in capsys.readouterr().out
    assert not Path("corpora").exists(), "no corpus was prepared for its tokenizer"


def test_a_model_that_no_family_has_is_refused_with_reasons(tmp_path: Path, capsys):
    ours = make_ours(tmp_path / "ours", "model.bias=false")
    assert main(["--to", "hf", str(ours), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    closest, *others = [line for line in said.splitlines() if line.startswith("  ")]
    assert closest.startswith("  gpt2: model.bias=False, not True")
    assert closest.count(";") < others[0].count(";") <= others[1].count(";")
    assert others[2].startswith("  do: train a model with the settings of one of these families")
    assert main(["--to", "hf", str(ours), str(ours)]) == 2
    assert "wants:  a new folder" in capsys.readouterr().err


def test_a_wrong_family_is_refused_with_the_right_one():
    model = decode(tiny_values(*VARIANTS["llama"])).model
    with pytest.raises(DataError, match=r"family t5: (?s:.*)do: write --family llama"):
        family_for(model, "t5")


def test_numbers_that_are_none_pass_nothing():
    good = torch.ones(1, 2, 3)
    assert compare_logits.Comparison.of(good, good).passes
    assert not compare_logits.Comparison.of(good * float("nan"), good).passes


def test_a_model_with_mup_is_refused_because_its_factors_have_no_place():
    values = tiny_values("model.mup_base_hidden=16", "model.mup_base_head_dim=8")
    with pytest.raises(DataError, match=r"gpt2: .*mup_base_hidden=16, not null"):
        family_for(decode(values).model, None)
