"""An encoder-decoder begins from a decoder, and at first only its cross-attention is updated."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from frontier_llm.data.corpus_manifest import Manifest
from frontier_llm.geometry.inventory import model_shapes
from frontier_llm.launch.world import World
from frontier_llm.saving.restorer import Restorer
from tests.checkpoint.states import assemble
from tests.checkpoint.test_layouts import collect, train_and_save
from tests.covering import covering, exhaustive
from tests.ranks import run_ranks
from tests.trainer.rig import Rig, make_rig
from tests.trainer.test_parity import assemble as pieces
from tests.trainer.test_parity import first_gradients
from tests.values import tiny_values

pytestmark = pytest.mark.slow

SIZES = ("model.kv_heads=2", "model.head_dim=8", "model.ffn=64", "model.vocabulary=300")
GEMMA = (*SIZES, "model.window=4", "model.attention_softcap=3", "model.logit_softcap=2")
BIASES = (
    *SIZES, "model.positions=rotary", "model.norm=layernorm", "model.norm_epsilon=1e-5",
    "model.bias=true", "model.qkv_bias=true", "model.tied=false", "model.activation=gelu",
    "model.scaled_attention=true",
)  # fmt: skip
DECODERS = {
    "gemma": ("model=gemma2_tiny", *GEMMA, "model.layers=2"),
    "biases": ("model=gpt_tiny", *BIASES, "model.layers=2"),
    "wide": (
        "model=gemma2_tiny", *GEMMA, "model.layers=1", "model.hidden=48", "model.ffn=80",
        "model.heads=6",
    ),
}  # fmt: skip
BOTH_SIDES = {
    # the decoder's window is that of the encoder too, so that the encoder can be compared with it
    "gemma": ("model=t5gemma_tiny", *GEMMA, "model.encoder_window=4", "data=stdlib_spans"),
    "biases": ("model=mt5_tiny", *BIASES, "data=stdlib_spans"),
    "merged": (
        "model=t5gemma_tiny",
        *GEMMA,
        "model.encoder_embedding=false",
        "model.cross_attention=merged",
        "data=stdlib_spans",
    ),
    "wide": (
        "model=t5gemma_tiny", *GEMMA, "model.layers=3", "model.encoder_layers=1",
        "model.encoder_hidden=48", "model.encoder_ffn=80", "model.encoder_heads=6",
        "data=stdlib_spans",
    ),
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "tensor2_pipeline2_zero3": (
        8, ("parallel.tensor=2", "parallel.pipeline=2", "sharding=zero3"),
    ),
    "tensor2_sequence_zero2": (
        4, ("parallel.tensor=2", "parallel.sequence=true", "sharding=zero2"),
    ),
    "pipeline2_folded_zero1": (
        4, ("parallel.pipeline=2", "parallel.chunks=2", "parallel.schedule=zb_v", "sharding=zero1"),
    ),
}  # fmt: skip
ALONE = 2
"""Steps that update only cross-attention."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Any]]:
    """Train a decoder for a step in a layout; return its checkpoint and all of its states."""

    @functools.cache
    def of(model: str, layout: str) -> tuple[Path, Any]:
        folder, (size, words) = tmp_path_factory.mktemp("decoder"), LAYOUTS[layout]
        values = tiny_values(*DECODERS[model], *words)
        found = run_ranks(train_and_save, size, folder, values, False)
        return folder, assemble([part for rank, _ in found for part in rank])

    return of


def begin(
    world: World, values: dict[str, Any], folder: Path, of_encoder: Path | None = None
) -> Rig:
    """Build a rank whose weights are those of checkpoints, as `run.init_from` does."""
    rig = make_rig(world, values)
    shapes = model_shapes(rig.config.model, rig.config.data.sequence_length)
    corpus = cast(Manifest, None)
    restorer = Restorer(rig.config, world, rig.states, shapes, corpus)
    restorer.load_initial_weights(folder, of_encoder)
    return rig


def outputs(world: World, values: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """Return the logits and the output of each stack; cross-attention returns 0."""
    chunk = begin(world, values, folder).model.chunks[0]
    tokens = (torch.arange(32).view(2, 16) * 11 + 3) % values["model"]["vocabulary"]
    found = {"tokens": tokens}
    sides = {"decoder": chunk.decoder, "encoder": chunk.encoder}
    for name, stack in sides.items():
        if stack is not None:
            stack.register_forward_hook(lambda *args, name=name: found.update({name: args[-1]}))
    if chunk.encoder is not None:
        chunk.encoder._bounds = dict.fromkeys(chunk.encoder._bounds, 1)
        for layer in cast(nn.Module, chunk.decoder).layers:
            layer.cross_attention.register_forward_hook(lambda *args: (args[-1][0] * 0, None))
    with torch.no_grad():
        positions = torch.arange(16).expand(2, -1)
        found["logits"] = chunk(tokens, positions, encoder_tokens=tokens if chunk.encoder else None)
    return found


@pytest.mark.parametrize("model", ["gemma", "biases"])
def test_both_sides_compute_what_the_decoder_computed(model: str, saved: Any) -> None:
    folder, _ = saved(model, "one")
    theirs = run_ranks(outputs, 1, tiny_values(*DECODERS[model]), folder)[0]
    ours = run_ranks(outputs, 1, tiny_values(*BOTH_SIDES[model]), folder)[0]
    assert theirs["logits"].std() > 0.1
    for name, of_theirs in {"logits": "logits", "decoder": "decoder", "encoder": "decoder"}.items():
        assert (ours[name] - theirs[of_theirs]).abs().max() == 0, name


def copies_of(decoder: dict[Any, Tensor], layers: int) -> dict[str, Tensor]:
    """Return all weights of the encoder-decoder, cut out of the decoder's by plain indexing."""
    weights = {name: tensor for (name, state), tensor in decoder.items() if state == "master"}
    found = dict(weights) | {"encoder_norm" + n[10:]: t for n, t in weights.items() if "final" in n}
    found |= {f"encoder_{n}": t for n, t in weights.items() if n.startswith("embedding.")}
    for name, tensor in weights.items():
        if not name.startswith("layers."):
            continue
        number, rest = name.removeprefix("layers.").split(".", 1)
        in_decoder = f"layers.{int(number) + layers}."
        found[in_decoder + rest] = tensor
        if not rest.startswith("attention"):
            continue
        if ".qkv." not in rest:
            found[f"{in_decoder}cross_{rest}"] = tensor
            continue
        by_head = tensor.view(2, 4, 8, *tensor.shape[1:])  # heads of keys, 2 queries + key + value
        query, key_value = by_head[:, :2], by_head[:, 2:]
        for part, rows in (("query", query), ("key_value", key_value)):
            name = f"{in_decoder}cross_{rest}".replace("qkv", part)
            found[name] = rows.reshape(-1, *tensor.shape[1:])
    return found


def begun(world: World, values: dict[str, Any], *folders: Path) -> list[Any]:
    return collect(begin(world, values, *folders) if folders else make_rig(world, values))


@pytest.mark.parametrize("target", covering(["one", "tensor2_pipeline2_zero3"], ["one"]))
def test_sides_of_other_widths_copy_a_decoder_each(target: str, saved: Any) -> None:
    (size, words), (folder, decoder) = LAYOUTS[target], saved("gemma", "one")
    wide, encoder = saved("wide", "tensor2_sequence_zero2" if target == "one" else "one")
    values = tiny_values(*BOTH_SIDES["wide"], *words)
    found, fresh = (
        assemble([part for rank in run_ranks(begun, size, values, *folders) for part in rank])
        for folders in ((folder, wide), ())
    )
    layers = {number: f"layers.{number + 1}." for number in range(2)}
    wanted = {key: tensor for key, tensor in fresh.items() if ".cross_attention" in key[0]}
    for (name, state), tensor in decoder.items():
        copy = re.sub(r"layers\.(\d+)\.", lambda n: layers[int(n[1])], name)
        wanted[copy, state] = tensor
    for (name, state), tensor in encoder.items():
        copy = name if name.startswith("layers") else "encoder_" + name.removeprefix("final_")
        wanted[copy, state] = tensor
    assert found.keys() == wanted.keys()
    for (name, state), tensor in found.items():
        expected = wanted[name, state] if state == "master" else torch.zeros(())
        assert torch.equal(tensor, expected.expand_as(tensor)), (name, state)


@pytest.mark.parametrize(
    ("model", "source", "target"),
    [
        ("gemma", "one", "tensor2_pipeline2_zero3"),
        ("gemma", "tensor2_pipeline2_zero3", "pipeline2_folded_zero1"),
        ("biases", "one", "tensor2_sequence_zero2"),
        *exhaustive(
            ("gemma", "tensor2_pipeline2_zero3", "one"),
            ("merged", "one", "tensor2_pipeline2_zero3"),
        ),
    ],
)
def test_every_weight_is_a_copy_in_any_layout(
    model: str, source: str, target: str, saved: Any
) -> None:
    folder, decoder = saved(model.replace("merged", "gemma"), source)
    size, words = LAYOUTS[target]
    found = run_ranks(begun, size, tiny_values(*BOTH_SIDES[model], *words), folder)
    states = assemble([part for rank in found for part in rank])
    wanted = copies_of(decoder, 2)
    shared = set() if model == "gemma" else {"encoder_embedding.tokens.weight"}
    if model == "merged":  # queries, keys and values in two matrices, which nothing is beside
        shared |= {name for name in wanted if re.search(r"[23]\.(attention.qkv|cross_)", name)}
        names = [name for name in wanted if re.search(r"cross_attention\.(query|key)", name)]
        wanted |= {name.replace("cross_", ""): wanted[name] for name in names}
    assert {name for name, _ in states} == wanted.keys() - shared
    for (name, state), tensor in states.items():
        expected = wanted[name] if state == "master" else torch.zeros(())
        assert torch.equal(tensor, expected.expand_as(tensor)), (name, state)


def train_alone(world: World, values: dict[str, Any], *folders: Path) -> Any:
    """Return states before, after the steps of cross-attention and after one more; the results."""
    rig = begin(world, values, *folders)
    states = [collect(rig)]
    results = rig.train(ALONE)
    states.append(collect(rig))
    results += rig.train(1, first=ALONE)
    states.append(collect(rig))
    return states, [number for r in results for number in (r.loss, r.grad_norm)]


@functools.cache
def alone(layout: str, *folders: Path) -> Any:
    size, words = LAYOUTS[layout]
    sides = BOTH_SIDES["gemma" if len(folders) == 1 else "wide"]
    own = (f"optimizer.cross_attention_steps={ALONE}", "optimizer.schedule=constant")
    values = tiny_values(*sides, *words, *own, "optimizer.epsilon=1e-12")
    found = run_ranks(train_alone, size, values, *folders, timeout=120)
    parts = [[part for rank, _ in found for part in rank[n]] for n in range(3)]
    return [assemble(part) for part in parts], found[0][1]


@pytest.mark.parametrize(
    ("layout", "models"),
    [
        *(
            (layout, ["gemma"])
            for layout in LAYOUTS
            if layout not in ("tensor2_sequence_zero2", "pipeline2_folded_zero1")
        ),
        ("tensor2_sequence_zero2", ["gemma", "wide"]),
        *exhaustive(("tensor2_sequence_zero2", ["gemma"]), ("pipeline2_folded_zero1", ["gemma"])),
    ],
)
def test_only_cross_attention_and_its_norms_change_at_first(
    layout: str, models: list[str], saved: Any
) -> None:
    folders = [saved(model, "one")[0] for model in models]
    (before, after, later), results = alone(layout, *folders)
    changed = {name for name, state in after if not after[name, state].equal(before[name, state])}
    assert changed == {name for name, _ in after if "cross_attention" in name}
    assert len(changed) == 2 * 5, "three matrices and two norms in each of two layers"
    assert results == pytest.approx(alone("one", *folders)[1], rel=1e-5)
    for (name, state), tensor in later.items():
        assert not tensor.equal(after[name, state]), (name, state)


def test_the_first_update_of_the_others_is_the_first_of_adam(saved: Any) -> None:
    """It moves each weight by the whole learning rate, and decays it."""
    (_, after, later), _ = alone("one", saved("gemma", "one")[0])
    optimizer = tiny_values()["optimizer"]
    rate = optimizer["learning_rate"]
    for name, _ in after:
        decay = 0.0 if "norm" in name else optimizer["weight_decay"] * rate
        move = later[name, "master"] - after[name, "master"] * (1 - decay)
        is_first = (move[later[name, "exp_avg"] != 0].abs() - rate).abs().max() < 1e-4 * rate
        assert is_first == ("cross_attention" not in name), name


def one_step(world: World, values: dict[str, Any], folder: Path) -> tuple[float, dict[str, Any]]:
    rig = begin(world, values, folder)
    (result,) = rig.train(1)
    return result.grad_norm, first_gradients(rig)


def test_the_norm_is_that_of_cross_attention(saved: Any) -> None:
    folder, values = saved("gemma", "one")[0], tiny_values(*BOTH_SIDES["gemma"])
    whole, gradients = run_ranks(one_step, 1, values, folder)[0]
    values["optimizer"]["cross_attention_steps"] = 1
    norm, left = run_ranks(one_step, 1, values, folder)[0]
    squares = {name: np.square(g).sum() for name, g in pieces([gradients]).items()}
    of_cross = sum(square for name, square in squares.items() if "cross_attention" in name)
    assert whole == pytest.approx(sum(squares.values()) ** 0.5, rel=1e-5)
    assert norm == pytest.approx(of_cross**0.5, rel=1e-5)
    assert all(g.any() == ("cross_attention" in name) for name, g in pieces([left]).items())
