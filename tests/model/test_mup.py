"""muP: a learning rate that suits a narrow model suits a wide one (arXiv:2203.03466)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frontier_llm.data.batch import Batch
from frontier_llm.launch.world import World
from frontier_llm.trainer.learning_rate import LearningRate
from tests.covering import covering, exhaustive
from tests.ranks import run_ranks
from tests.trainer.rig import Rig, make_rig
from tests.trainer.test_parity import BATCH, LAYOUTS, MODELS, compare, reference, train_and_collect
from tests.values import tiny_values

pytestmark = pytest.mark.slow

TEXT = Path(__file__).parents[2] / "LICENSE"
LENGTH, SAMPLES = 32, 16
WIDTH = 32
"""Width of the base model, which has 4 heads."""
SETTINGS = (
    "model.layers=2", "model.vocabulary=128", "data.vocabulary=128", "optimizer.clip_norm=1.0",
    f"data.sequence_length={LENGTH}", f"data.global_batch={SAMPLES}",
    f"data.micro_batch={SAMPLES}", "optimizer.schedule=linear",
    "optimizer.minimum_learning_rate=0.0",
)  # fmt: skip
MUP = (f"model.mup_base_hidden={WIDTH}", f"model.mup_base_head_dim={WIDTH // 4}")
HALF = ("model.mup_base_hidden=16", "model.mup_base_head_dim=4")
"""muP in the tiny model of the tests, whose width is 32 and which has 4 heads."""


def batches(steps: int, seed: int) -> list[Batch]:
    """Return random windows of a text, one batch per step."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(LENGTH).expand(SAMPLES, -1)
    found = []
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (SAMPLES,), generator=generator)
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])
        found.append(Batch(rows[:, :-1], rows[:, 1:], positions))
    return found


def train(rig: Rig, data: Sequence[Batch]) -> list[float]:
    rate = LearningRate.of(rig.config)
    steps = enumerate(data, start=1)
    return [rig.step.run(step, [batch], rate(step)).loss for step, batch in steps]


def wide(factor: int, *overrides: str, grows: str = "heads") -> dict[str, Any]:
    """Compose a model that is wider than the base model by more heads or by wider ones."""
    heads = 4 * factor if grows == "heads" else 4
    width = (f"model.hidden={WIDTH * factor}", f"model.heads={heads}")
    return tiny_values(*SETTINGS, *width, *overrides)


# the best learning rate

STEPS, SEEDS = 60, (1, 2)
EXPONENTS = range(-10, -3)
"""The learning rates of the sweep are powers of 2."""


def sweep(world: World, factor: int, mup: Sequence[str]) -> list[float]:
    """Return the mean loss of the last ten steps, for each learning rate."""
    means, rig = [], None
    for exponent in EXPONENTS:
        losses = []
        for seed in SEEDS:
            values = wide(
                factor, *mup, f"optimizer.learning_rate={2.0**exponent}", f"trainer.seed={seed}",
                f"trainer.steps={STEPS}",
            )  # fmt: skip
            rig = make_rig(world, values, groups_of=rig)
            losses += train(rig, batches(STEPS, seed))[-10:]
        means.append(float(np.mean(losses)))
    return means


def best(losses: Sequence[float]) -> float:
    """Return the exponent of the best rate: the vertex of a parabola through the three lowest."""
    lowest = int(np.argmin(losses))
    assert 0 < lowest < len(losses) - 1, f"the sweep does not contain the best rate: {losses}"
    before, at, after = losses[lowest - 1 : lowest + 2]
    return EXPONENTS[lowest] + (before - after) / (2 * (before - 2 * at + after))


@pytest.mark.exhaustive
def test_the_best_rate_carries_over_to_four_times_the_width() -> None:
    """Without muP it is lower, and the best rate of the narrow model costs loss."""
    (narrow,), (standard,), (mup,) = (
        run_ranks(sweep, 1, factor, keys, timeout=600)
        for factor, keys in ((1, ()), (4, ()), (4, MUP))
    )
    assert abs(best(mup) - best(narrow)) < 0.6, (narrow, mup)
    assert best(narrow) - best(standard) > 1.0, (narrow, standard)
    chosen = int(np.argmin(narrow))
    assert mup[chosen] < min(narrow)
    assert mup[chosen] < standard[chosen] - 0.1
    assert min(mup) < min(standard) + 0.05


# the coordinate check


def activations(rig: Rig, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the outputs of the modules of a forward pass, and the scores of an attention."""
    (chunk,) = rig.model.chunks
    modules = {
        "embedding": chunk.embedding,
        **{f"layer {n}": layer for n, layer in enumerate(chunk.decoder.layers)},
        "attention": chunk.decoder.layers[1].self_attention,
        "feed-forward": chunk.decoder.layers[1].mlp,
        "logits": chunk.output_layer,
    }
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, output: Any) -> None:
        found[name] = (output[0] if isinstance(output, tuple) else output).detach().clone()

    def keep_scores(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        query, key, *_ = inputs
        scale = module.scores.scale or query.shape[-1] ** -0.5
        found["scores"] = scale * torch.einsum("sbhd,tbhd->bhst", query, key)

    core = chunk.decoder.layers[1].self_attention.core_attention
    handles = [core.register_forward_pre_hook(keep_scores)]
    handles += [
        module.register_forward_hook(lambda _, __, output, name=name: keep(name, output))
        for name, module in modules.items()
    ]
    with torch.no_grad():
        chunk(**batch.inputs())
    for handle in handles:
        handle.remove()
    return found


def growth(world: World, steps: int, cases: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return for each width the size by which activations have changed after some steps."""
    sizes, rig = [], None
    for values in cases:
        rig = make_rig(world, dict(values), groups_of=rig)
        data = batches(steps + 1, 1)
        before = activations(rig, data[-1])
        train(rig, data[:steps])
        after = activations(rig, data[-1])
        sizes.append({n: (after[n] - before[n]).square().mean().sqrt().item() for n in after})
    return sizes


def slopes(steps: int, factors: Sequence[int], cases: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the power of the width with which the change of each activation grows."""
    (sizes,) = run_ranks(growth, 1, steps, cases)
    return {
        name: float(np.polyfit(np.log(factors), np.log([size[name] for size in sizes]), 1)[0])
        for name in sizes[0]
    }


@pytest.mark.parametrize("grows", covering(["heads", "head width"], ["heads"]))
def test_activations_change_by_the_same_size_in_every_width(grows: str) -> None:
    keys, factors = ("optimizer.learning_rate=0.01", "trainer.steps=40"), (1, 2, 4, 8)
    with_mup, without = (
        slopes(4, factors, [wide(factor, *mup, *keys, grows=grows) for factor in factors])
        for mup in (MUP, ())
    )
    del with_mup["scores"]  # they are noise in the first steps
    assert max(map(abs, with_mup.values())) < 0.25, with_mup
    assert min(without["logits"], without["layer 1"]) > 0.4, without


@pytest.mark.exhaustive
def test_scores_of_wider_heads_grow_unless_they_are_divided_by_the_width() -> None:
    """Queries and keys become correlated in training, so their products grow with the width."""
    keys, factors = ("optimizer.learning_rate=0.015", "trainer.steps=120"), (1, 2, 4)
    # with a base head_dim that grows too, the scores are divided by sqrt(head_dim)
    with_mup, with_root = (
        slopes(60, factors, [
            wide(n, MUP[0], f"model.mup_base_head_dim={base[n]}", *keys, grows="head width")
            for n in factors
        ])["scores"]
        for base in (dict.fromkeys(factors, 8), {n: 8 * n for n in factors})
    )  # fmt: skip
    assert abs(with_mup) < 0.3
    assert with_root > 0.4


# the definition


def describe(world: World, values: dict[str, Any]) -> dict[str, Any]:
    rig = make_rig(world, values)
    scale = rig.model.chunks[0].decoder.layers[0].self_attention.core_attention.scores.scale
    deviations = {r.name: r.parameter.std().item() for r in rig.model.records if r.is_matrix}
    return {
        "deviations": deviations,
        "factors": {r.name: r.rate_factor for r in rig.model.records},
        "scale": scale,
        "logits": activations(rig, batches(1, 1)[0])["logits"],
    }


@pytest.mark.parametrize("tied", ["true", "false"])
def test_the_table_of_the_paper(tied: str) -> None:
    """Table 8, at four times the base width: matrices of layers, head, embedding and norms."""
    keys = ("model.init_std=0.1", f"model.tied={tied}")
    (plain,), (mup,) = (
        run_ranks(describe, 1, wide(4, *keys, *more, grows="head width")) for more in ((), MUP)
    )
    assert plain["scale"] is None
    assert mup["scale"] == pytest.approx((WIDTH / 4) ** 0.5 / WIDTH)
    for name, factor in mup["factors"].items():
        is_hidden = name.startswith("layers.") and "norm" not in name and name.endswith("weight")
        assert factor == (0.25 if is_hidden else 1.0), name
        if name in mup["deviations"]:
            ratio = mup["deviations"][name] / plain["deviations"][name]
            assert ratio == pytest.approx(0.5 if is_hidden else 1.0), name
    # the layers change the input of the head little at the start, which is normalised anyway
    ratio = mup["logits"].std() / plain["logits"].std()
    assert ratio.item() == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize("model", MODELS)
def test_the_base_model_is_the_same_to_the_bit(model: str) -> None:
    base = ("model.mup_base_hidden=32", "model.mup_base_head_dim=8")
    values = [tiny_values(*MODELS[model], *BATCH, *keys) for keys in ((), base)]
    plain, mup = (run_ranks(train_and_collect, 1, v, "fp32", 3)[0] for v in values)
    assert plain[:2] == mup[:2]


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        *exhaustive(("tensor2_sequence", "tied_gelu")),
        ("tensor2_pipeline2_data2", "tied_gelu"),
        ("pipeline2_chunks2", "untied_gqa_swiglu"),
        *exhaustive(("data2", "untied_gqa_swiglu")),
    ],
)
@pytest.mark.parametrize("sharding", covering(["zero1", "zero3"], ["zero1"]))
def test_layout_equals_one_process(layout: str, model: str, sharding: str) -> None:
    size, overrides = LAYOUTS[layout]
    mup = [*MODELS[model], *HALF]
    compare(size, [*overrides, *BATCH, f"sharding={sharding}"], mup)
    plain = reference((*MODELS[model], *BATCH), 3)[0]
    assert not np.allclose(plain, reference((*mup, *BATCH), 3)[0], rtol=1e-5)


def decays(world: World, values: dict[str, Any]) -> float:
    """Return the factor by which a step without gradients shrinks a matrix of a layer."""
    rig = make_rig(world, values)
    shards = [s for s in rig.states.shards() if s.record.name == "layers.1.ffn.up.weight"]
    before = shards[0].master.clone()
    for shard in rig.states.shards():
        shard.states["exp_avg_sq"].fill_(1e30)  # the update of Adam vanishes
    rig.train(1)
    return float((shards[0].master / before).mean())


@pytest.mark.parametrize("mup", [(), HALF], ids=["plain", "mup"])
def test_weight_decay_does_not_depend_on_the_width(mup: tuple[str, ...]) -> None:
    settings = ("optimizer.learning_rate=0.01", "optimizer.weight_decay=0.5", *BATCH)
    (factor,) = run_ranks(decays, 1, tiny_values(*settings, *mup, "optimizer.schedule=constant"))
    assert factor == pytest.approx(1 - 0.01 * 0.5, rel=1e-6)
