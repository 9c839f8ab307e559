"""geometry/flops.py against torch's counter on the real modules."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.flops import forward_flops, step_hardware_flops, step_model_flops
from frontier_llm.geometry.lengths import sample_lengths
from frontier_llm.launch.world import World
from tests.covering import covering
from tests.ranks import run_ranks
from tests.trainer.rig import make_rig
from tests.values import GEMMA3, SIDES, T5GEMMA, T5GEMMA2, TINY_T5, tiny_values

pytestmark = pytest.mark.slow

MODELS = {
    "gelu": [],
    "swiglu_gqa": ["model.activation=swiglu", "model.kv_heads=2", "model.tied=false"],
    "gemma3": [*GEMMA3, "model.window=64"],
    "wide_heads": ["model.head_dim=16", "model.ffn=96", "model.qk_norm=head"],
}
T5 = [*TINY_T5, "model.layers=5"]


def count(world: World, values: dict[str, Any], *, train: bool) -> float:
    """Count the operations of a rank (the vocabularies used here need no padding)."""
    rig = make_rig(world, values)
    batches = rig.batches(0)
    # the textbook kernel: made of products that the counter knows
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        if train:
            rig.step.run(1, batches, 1e-3)
        else:
            with torch.no_grad():
                batch = batches[0]
                rig.model.chunks[0](**batch.inputs(), labels=batch.labels)
    return float(counter.get_total_flops())


WHOLE = ["model.window=64", "model.encoder_window=64", "model.encoder_window_after=null"]
ROTARY_T5 = [*T5, "model.positions=rotary", "model.kv_heads=2", "model.qk_norm=head"]


@pytest.mark.parametrize(
    "model",
    [
        *MODELS.values(),
        T5,
        ROTARY_T5,
        *([*model, *WHOLE] for model in (T5GEMMA, SIDES, T5GEMMA2)),
    ],
    ids=[*MODELS, "t5", "rotary_t5", "t5gemma", "sides", "t5gemma2"],
)
def test_forward_is_counted_exactly(model: list[str]) -> None:
    values = tiny_values(*model)
    counted = run_ranks(lambda w: count(w, values, train=False), 1)[0]
    config = make_config(values)
    assert counted == forward_flops(config.model, sample_lengths(config.model, config.data)).total


@pytest.mark.parametrize("model", covering(MODELS, ["wide_heads", "gelu"]))
@pytest.mark.parametrize(
    "layout",
    covering([[], ["parallel.tensor=2"], ["parallel.pipeline=2"]], [[], ["parallel.pipeline=2"]]),
)
def test_step_is_counted_exactly_over_all_ranks(layout: list[str], model: str) -> None:
    values = tiny_values("model.vocabulary=256", *MODELS[model], *layout)
    config = make_config(values)
    counted = sum(run_ranks(lambda w: count(w, values, train=True), 2))
    expected = step_model_flops(
        config.model, sample_lengths(config.model, config.data), config.data.global_batch
    )
    assert counted == expected


@pytest.mark.parametrize(
    "layout", covering([["parallel.tensor=2"], ["parallel.pipeline=2"]], [["parallel.pipeline=2"]])
)
def test_a_t5s_step_is_counted_without_the_recomputation_of_attention(layout: list[str]) -> None:
    """The scores of self attention, in the backward pass: no kernel's own are counted either."""
    values = tiny_values(*T5, "model.vocabulary=256", *layout)
    config = make_config(values)
    data = config.data
    lengths = sample_lengths(config.model, data)
    counted = sum(run_ranks(lambda w: count(w, values, train=True), 2))
    needed = step_model_flops(config.model, sample_lengths(config.model, data), data.global_batch)
    heads = config.model.heads * config.model.head_dim
    scores = 2 * heads * (2 * lengths.encoder**2 + 3 * lengths.decoder**2)
    assert counted == needed + data.global_batch * scores


@pytest.mark.parametrize("recompute", covering(["selective", "full"], ["selective"]))
def test_recomputation_counts_as_hardware_only(recompute: str) -> None:
    values = tiny_values(f"recompute={recompute}")
    config = make_config(values)
    counted = sum(run_ranks(lambda w: count(w, values, train=True), 1))
    data = config.data
    sizes = config.model, sample_lengths(config.model, data)
    hardware = step_hardware_flops(*sizes, data.global_batch, recompute)
    # the second of attention's two products is not computed again; other kernels have one operation
    not_again = forward_flops(*sizes).attention / 2 if recompute == "selective" else 0.0
    assert counted == hardware - data.global_batch * not_again
    assert hardware > step_model_flops(*sizes, data.global_batch)


def make_config(values: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(values)
