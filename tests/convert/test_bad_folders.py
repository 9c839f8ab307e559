"""Hugging Face folders with wrong values: each is refused, or gives exactly their weights."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from frontier_lab.commands.convert import from_theirs
from frontier_lab.convert.families import check_surplus, family_of
from frontier_lab.convert.ours import OurWeights
from frontier_lab.convert.table import select
from frontier_lab.convert.theirs import INDEX, TheirWeights, save_tensors
from frontier_llm.errors import FrontierError
from frontier_llm.geometry.inventory import model_shapes
from tests.hostile import cpu_seconds

pytestmark = pytest.mark.forked  # a limit of the processor's time needs the main thread
Tensors = dict[str, torch.Tensor]
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 51, "max_position_embeddings": 24, "hidden_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 51, "n_positions": 24, "n_embd": 16, "n_layer": 2,
    "n_head": 4, "activation_function": "gelu_new",
}  # fmt: skip
T5: dict[str, Any] = {
    "model_type": "t5", "vocab_size": 251, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1,
    "num_decoder_layers": 1, "num_heads": 4, "feed_forward_proj": "gated-gelu",
}  # fmt: skip


def llama_tensors() -> Tensors:
    shapes = {"model.embed_tokens.weight": (51, 16), "model.norm.weight": (16,)}
    for layer in range(2):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (16,),
            f"{name}.post_attention_layernorm.weight": (16,),
            f"{name}.self_attn.q_proj.weight": (16, 16),
            f"{name}.self_attn.k_proj.weight": (8, 16),
            f"{name}.self_attn.v_proj.weight": (8, 16),
            f"{name}.self_attn.o_proj.weight": (16, 16),
            f"{name}.mlp.gate_proj.weight": (24, 16),
            f"{name}.mlp.up_proj.weight": (24, 16),
            f"{name}.mlp.down_proj.weight": (16, 24),
        }
    torch.manual_seed(2)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def write(folder: Path, config: Any, tensors: Tensors, text: str | None = None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config) if text is None else text)
    save_file(tensors, folder / "model.safetensors")


def converts(folder: Path, out: Path) -> str:
    """Convert within limits; return why it is refused, or "" if the weights are theirs."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    try:
        with cpu_seconds(10):
            converted = from_theirs(folder, out, out)
    except FrontierError as error:
        return str(error)
    config, ours = converted.config, OurWeights(out)
    family = family_of(json.loads((folder / "config.json").read_text()))
    theirs: Tensors = {}
    for path in folder.glob("*.safetensors"):
        theirs |= load_file(path)
    shapes = model_shapes(config.model, config.data.sequence_length)
    for row in select(family.rows(config.model), shapes):
        parts = row.transform.to_theirs(ours.read(row.ours))
        for name, part in zip(row.theirs, parts, strict=True):
            assert torch.equal(part, theirs[name].float()), name
    return ""


def bad_configs() -> Iterator[tuple[Any, str | None]]:
    """Yield (content of config.json, its text if it is no JSON)."""
    for content in ([], 3, "text", None, True):
        yield content, None
    for text in (
        "{",
        "[" * 200_000,
        '{"a":' * 100_000,
        "\ud800".encode("utf-8", "ignore").decode(),
    ):
        yield None, text
    for key in (*LLAMA, "head_dim", "attention_dropout"):
        for new in (None, "x", {"a": 1}, -1, 10**12, math.nan):
            yield {**LLAMA, key: new}, None
    for rope in (3, "x", [1], {"rope_type": ["yarn"]}, {"rope_type": "yarn", "factor": "x"},
                 {"rope_type": "yarn", "factor": math.nan}, {"rope_theta": {}},
                 {"rope_type": "llama3", "original_max_position_embeddings": "x"}):  # fmt: skip
        yield {**LLAMA, "rope_scaling": rope}, None
    yield {**LLAMA, "model_type": "qwen2", "layer_types": 3}, None
    yield {**LLAMA, "model_type": "qwen2", "layer_types": [{}]}, None
    yield {**LLAMA, "model_type": ["llama"]}, None
    for key, new in (("num_decoder_layers", "x"), ("num_layers", 10**12), ("num_layers", None)):
        yield {**T5, key: new}, None
    for new in (10**12, "${oc.env:HOME}", 2.5):
        yield {**GPT2, "n_layer": new}, None


@pytest.mark.exhaustive
def test_no_config_ends_in_a_traceback(tmp_path: Path) -> None:
    tensors, refused, count = llama_tensors(), 0, 0
    for content, text in bad_configs():
        write(tmp_path / "theirs", content, tensors, text)
        refused += bool(converts(tmp_path / "theirs", tmp_path / "out"))
        count += 1
    assert count > 100
    assert refused > 0.8 * count


def test_a_tied_head_is_no_damage(tmp_path: Path) -> None:
    tensors = {name: value for name, value in llama_tensors().items() if name != "lm_head.weight"}
    write(tmp_path / "theirs", {**LLAMA, "tie_word_embeddings": False}, tensors)
    refusal = converts(tmp_path / "theirs", tmp_path / "out")
    assert "the model lacks lm_head.weight" in refusal
    assert "convert a model with a head of its own" in refusal


def test_a_model_without_ids_for_sentinels_is_refused_for_its_vocabulary(tmp_path: Path) -> None:
    write(tmp_path / "theirs", {**T5, "vocab_size": 101}, llama_tensors() | {"x": torch.ones(101)})
    refusal = converts(tmp_path / "theirs", tmp_path / "out")
    assert "vocab_size=101 is too small" in refusal
    assert "convert a model of 102 or more tokens" in refusal


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    path = tmp_path / "theirs" / "config.json"
    for text in ("{", "[]"):
        write(path.parent, None, llama_tensors(), text)
        assert f"{path} cannot be read" in converts(path.parent, tmp_path / "out")
    path.unlink()
    assert "it has no config.json\n  do: " in converts(path.parent, tmp_path / "out")


def test_files_are_readable_as_the_umask_says(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        save_tensors({"a": torch.ones(2)}, tmp_path / "file")
    finally:
        os.umask(old)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    assert load_file(tmp_path / "file")["a"].tolist() == [1, 1]


def test_the_folder_is_good(tmp_path: Path) -> None:
    write(tmp_path / "theirs", LLAMA, llama_tensors())
    assert converts(tmp_path / "theirs", tmp_path / "out") == ""


EMBEDDING = "model.embed_tokens.weight"
INVERSE = "model.layers.0.self_attn.rotary_emb.inv_freq"
FREQUENCIES = 10000.0 ** -(torch.arange(2) / 2)
MATRIX = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda t: {"lm_head.weight": t[EMBEDDING].clone()}, ""),
        (lambda t: {"lm_head.weight": t[EMBEDDING] + 1}, "lm_head.weight differs from model.embed"),
        (lambda t: {"lm_head.weight": t[EMBEDDING][:9].clone()}, "lm_head.weight differs"),
        (lambda _: {INVERSE: FREQUENCIES.half()}, ""),
        (lambda _: {INVERSE: 1.5 * FREQUENCIES}, "the buffer"),
        (lambda _: {INVERSE: torch.ones(2, 2)}, "the buffer"),
        (lambda _: {"model.extra.weight": torch.ones(1)}, "model.extra.weight has no place"),
        (lambda t: {MATRIX: t[MATRIX] * math.nan}, f"{MATRIX} has 384 weights that are NaN"),
        (lambda t: {MATRIX: (t[MATRIX] * math.inf).bfloat16()}, "NaN or infinite"),
        (lambda t: {MATRIX: t[MATRIX].to(torch.int8)}, "no dtype of weights"),
        (lambda t: {MATRIX: t[MATRIX].bfloat16()}, ""),
        (lambda t: {MATRIX: t[MATRIX].t().contiguous()}, "by config.json should give"),
    ],
)  # fmt: skip
def test_every_tensor_is_used_or_compared(
    extra: Callable[[Tensors], Tensors], message: str, tmp_path: Path
) -> None:
    tensors = llama_tensors()
    write(tmp_path / "theirs", LLAMA, {**tensors, **extra(tensors)})
    refusal = converts(tmp_path / "theirs", tmp_path / "out")
    assert message in refusal
    assert bool(message) == bool(refusal)


def test_the_masks_of_gpt_2_are_compared(tmp_path: Path) -> None:
    names = {"wte.weight": (51, 16), "wpe.weight": (24, 16), "ln_f.weight": (16,),
             "ln_f.bias": (16,)}  # fmt: skip
    for layer in range(2):
        projections = {"attn.c_attn": (16, 48), "attn.c_proj": (16, 16), "mlp.c_fc": (16, 64),
                       "mlp.c_proj": (64, 16)}  # fmt: skip
        for part, (rows, columns) in projections.items():
            names[f"h.{layer}.{part}.weight"] = (rows, columns)
            names[f"h.{layer}.{part}.bias"] = (columns,)
        for norm in ("ln_1", "ln_2"):
            names |= {f"h.{layer}.{norm}.weight": (16,), f"h.{layer}.{norm}.bias": (16,)}
    tensors = {f"transformer.{name}": torch.randn(shape) for name, shape in names.items()}
    mask = torch.ones(1, 1, 24, 24).tril()
    good = {
        "transformer.h.0.attn.bias": mask,
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
        "lm_head.weight": tensors["transformer.wte.weight"].clone(),
    }
    write(tmp_path / "theirs", GPT2, tensors | good)
    assert converts(tmp_path / "theirs", tmp_path / "out") == ""
    for name, wrong in (
        ("transformer.h.0.attn.bias", torch.ones(1, 1, 24, 24)),
        ("transformer.h.0.attn.bias", torch.ones(5)),
        ("transformer.h.0.attn.masked_bias", torch.tensor(0.0)),
    ):
        write(tmp_path / "theirs", GPT2, tensors | good | {name: wrong})
        assert "the buffer" in converts(tmp_path / "theirs", tmp_path / "out")


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_copies_of_t5_s_embedding_are_compared(stack: str, tmp_path: Path) -> None:
    tensors = {"shared.weight": torch.randn(5, 4)}
    name = f"{stack}.embed_tokens.weight"
    for copy, message in ((tensors["shared.weight"].clone(), ""), (torch.ones(5, 4), name)):
        write(tmp_path / "theirs", T5, {**tensors, name: copy})
        weights, family = TheirWeights(tmp_path / "theirs"), family_of(T5)
        if not message:
            check_surplus(family, weights, [name], 10000.0)
            continue
        with pytest.raises(FrontierError, match=f"{message} differs from shared.weight"):
            check_surplus(family, weights, [name], 10000.0)


def pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def link_to(target: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(target)

    return link


def config_pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def index_of(weight_map: Any) -> Callable[[Path], None]:
    def write_index(folder: Path) -> None:
        content = {"weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(content))
        (folder / "model.safetensors").rename(folder / "all.safetensors")

    return write_index


@pytest.mark.parametrize(
    "edit",
    [
        pipe, config_pipe, link_to("absent"), link_to("/dev/zero"), link_to("model.safetensors"),
        *map(index_of, (
            3, [], {}, {EMBEDDING: 3}, {EMBEDDING: None}, {EMBEDDING: "/dev/zero"},
            {EMBEDDING: "../theirs/all.safetensors"}, {EMBEDDING: "a\0b"}, {EMBEDDING: ".."},
            {EMBEDDING: ""}, {"absent": "all.safetensors"}, {EMBEDDING: "\x1b[31m"},
        )),
    ],
)  # fmt: skip
def test_files_that_are_no_files_of_the_folder(
    edit: Callable[[Path], None], tmp_path: Path
) -> None:
    write(tmp_path / "theirs", LLAMA, llama_tensors())
    edit(tmp_path / "theirs")
    refusal = converts(tmp_path / "theirs", tmp_path / "out")
    assert refusal
    assert "\x1b" not in refusal


def test_a_single_file_is_read_although_an_index_lies_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "theirs", LLAMA, llama_tensors())
    save_tensors({"old": torch.ones(2)}, tmp_path / "theirs" / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"old": "model-00001-of-00001.safetensors"}}
    (tmp_path / "theirs" / INDEX).write_text(json.dumps(index))
    assert converts(tmp_path / "theirs", tmp_path / "out") == ""


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "theirs", LLAMA, llama_tensors())
    (tmp_path / "theirs" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "merge_and_unload" in converts(tmp_path / "theirs", tmp_path / "out")


@pytest.mark.parametrize("name", ["llama3_8b", "gpt2.v1", "llama"])
def test_a_run_may_be_called_like_a_model_of_this_project(tmp_path: Path, name: str) -> None:
    write(tmp_path / "theirs", LLAMA, llama_tensors())
    assert converts(tmp_path / "theirs", tmp_path / name) == ""


def test_links_of_a_download_cache_are_followed(tmp_path: Path) -> None:
    write(tmp_path / "theirs", LLAMA, llama_tensors())
    (tmp_path / "theirs" / "model.safetensors").rename(tmp_path / "blob")
    (tmp_path / "theirs" / "model.safetensors").symlink_to(tmp_path / "blob")
    assert converts(tmp_path / "theirs", tmp_path / "out") == ""


def test_truncated_and_flipped_files_are_refused_or_give_their_weights(tmp_path: Path) -> None:
    write(tmp_path / "theirs", LLAMA, llama_tensors())
    path = tmp_path / "theirs" / "model.safetensors"
    content = path.read_bytes()
    for size in (0, 4, 8, 100, len(content) - 1):
        path.write_bytes(content[:size])
        refusal = converts(tmp_path / "theirs", tmp_path / "out")
        assert f"{path} is damaged or not complete" in refusal
        assert "do: copy or download the file again" in refusal
    path.write_bytes(b"\xff" * 8 + content[8:])
    assert converts(tmp_path / "theirs", tmp_path / "out")


def test_a_tokenizer_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    from frontier_llm.data.tokenizer_source import open_tokenizer

    (tmp_path / "tokenizer.json").write_text('{"model":' * 100_000)
    with pytest.raises(FrontierError, match="a JSON file"):
        open_tokenizer(tmp_path)
