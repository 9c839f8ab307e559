"""The mean loss over tokens: one process with plain PyTorch, and every layout as one process."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from frontier_llm.config.run import RunConfig
from frontier_llm.device.kernels import resolve
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.launch.world import World
from frontier_llm.model.build import build_model
from frontier_llm.parallel.groups import make_groups
from frontier_llm.parallel.megatron_cpu import install
from frontier_llm.trainer.learning_rate import LearningRate
from tests.batches import random_batch
from tests.covering import covering
from tests.ranks import run_ranks
from tests.trainer.rig import CPU, make_rig
from tests.trainer.test_parity import BATCH, compare, reference
from tests.trainer.test_sharding_parity import factors
from tests.values import TINY_T5, tiny_values

pytestmark = pytest.mark.slow

STEPS = 3
# a large epsilon, so that an update depends on the size of the gradient, which clipping changes
ADAMW = ["optimizer.epsilon=0.01", "optimizer.weight_decay=0.0", "optimizer.learning_rate=0.1"]
TOKENS = ["data.loss_mean=tokens", *BATCH, *ADAMW]
MODELS = {
    "separate": ["data.documents=separate"],
    "spans": [*TINY_T5, "data.micro_batch=2"],
    "z_loss": ["data.documents=separate", "optimizer.z_loss=0.1"],
}


def plain(world: World, values: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Train with torch's cross entropy over all predicted tokens of a global batch, and AdamW."""
    install()
    config = RunConfig.model_validate(values)
    layout = ResolvedLayout.resolve(config, 1, 1, precision="fp32", check_rules=False)
    groups = make_groups(layout.grid, layout.head_stage)
    model = build_model(layout, groups, CPU, resolve(config.kernels, CPU), config.trainer.seed)
    (module,) = model.chunks
    parameters = [record.parameter for record in model.records]
    rules = config.optimizer
    adamw = torch.optim.AdamW(parameters, betas=(rules.beta1, rules.beta2), eps=rules.epsilon,
                              weight_decay=0.0)  # fmt: skip
    losses, norms, rate = [], [], LearningRate.of(config)
    for step in range(STEPS):
        first = step * config.data.global_batch
        batch = random_batch(config, range(first, first + config.data.global_batch))
        logits = module(**batch.inputs())[..., : config.model.vocabulary].float()
        assert batch.loss_mask is not None
        kept = batch.loss_mask > 0
        assert len(set(kept.sum(1).tolist())) > 1, "samples with different numbers of labels"
        loss = torch.nn.functional.cross_entropy(logits[kept], batch.labels[kept])
        losses.append(loss.item())
        loss = loss + rules.z_loss * logits[kept].logsumexp(-1).square().mean()
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, rules.clip_norm or torch.inf)
        norms.append(norm.item())
        adamw.param_groups[0]["lr"] = rate(step + 1)
        adamw.step()
    return losses, norms


def trained(world: World, values: dict[str, Any]) -> tuple[list[float], list[float]]:
    results = make_rig(world, values).train(STEPS)
    return [r.loss for r in results], [r.grad_norm for r in results]


LAYOUTS = {
    "alone": (1, []),
    "tensor2_pipeline2_data2": (8, ["parallel.tensor=2", "parallel.pipeline=2"]),
    "zero3": (2, ["sharding=zero3"]),
}


CASES = list(product(MODELS, LAYOUTS, ["null", "0.5"]))
CHOSEN = [
    ("separate", "alone", "null"),
    ("separate", "tensor2_pipeline2_data2", "0.5"),
    ("spans", "zero3", "0.5"),
    ("z_loss", "zero3", "0.5"),
]


@pytest.mark.parametrize(
    "case", covering(CASES, [c for c in CASES if c not in CHOSEN]), ids="-".join
)
def test_the_mean_over_tokens_is_that_of_torch(case: tuple[str, str, str]) -> None:
    """Losses, norms before clipping, and (through later losses) the updates."""
    model, layout, clip_norm = case
    size, overrides = LAYOUTS[layout]
    values = [*MODELS[model], *TOKENS, f"optimizer.clip_norm={clip_norm}"]
    losses, norms = run_ranks(plain, 1, tiny_values(*values))[0]
    assert min(norms) > 0.5, "all steps are clipped"
    for found in run_ranks(trained, size, tiny_values(*values, *overrides)):
        np.testing.assert_allclose(found[0], losses, rtol=2e-5)
        np.testing.assert_allclose(found[1], norms, rtol=2e-5)


PARITY = {
    "interleaved": (2, ["parallel.pipeline=2", "parallel.chunks=2"]),
    "sequence_zero2": (4, ["parallel.tensor=2", "parallel.sequence=true", *factors((1, 2, 2))]),
    "micro_batch_of_two": (2, ["parallel.pipeline=2", "data.micro_batch=2"]),
}


@pytest.mark.parametrize("case", covering(PARITY, ["micro_batch_of_two"]))
def test_gradients_of_a_layout_equal_one_process(case: str) -> None:
    size, layout = PARITY[case]
    compare(size, [*layout, *TOKENS], MODELS["separate"], 2)


def test_quantised_gradients_stay_near() -> None:
    """int8 blocks move a loss by less than bf16's bound, 1%."""
    values = [*MODELS["separate"], *TOKENS, "data.global_batch=8"]
    wire = ["collectives=zeropp", "collectives.block_elements=64", *factors((2, 4, 4))]
    losses, norms = run_ranks(plain, 1, tiny_values(*values))[0]
    for found in run_ranks(trained, 4, tiny_values(*values, *wire)):
        np.testing.assert_allclose(found[0], losses, rtol=1e-2)
        np.testing.assert_allclose(found[1], norms, rtol=5e-2)


def test_means_over_samples_and_over_tokens_differ() -> None:
    """Else the comparisons above would prove nothing."""
    both = [
        reference((*MODELS["separate"], *BATCH, f"data.loss_mean={by}"), 2)[:2]
        for by in ("samples", "tokens")
    ]
    assert not np.allclose(both[0], both[1], rtol=1e-3)


def test_fp16_scales_the_loss_of_tokens() -> None:
    values = [*MODELS["separate"], *TOKENS, "optimizer.clip_norm=0.5", "precision=fp16"]
    losses, norms = run_ranks(plain, 1, tiny_values(*values))[0]

    def in_fp16(world: World) -> tuple[list[float], list[float]]:
        results = make_rig(world, tiny_values(*values), "fp16").train(STEPS)
        return [r.loss for r in results], [r.grad_norm for r in results]

    found = run_ranks(in_fp16, 1)[0]
    np.testing.assert_allclose(found[0], losses, rtol=1e-2)
    np.testing.assert_allclose(found[1], norms, rtol=2e-2)
