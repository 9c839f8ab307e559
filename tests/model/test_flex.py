"""FlexAttention gives the numbers of the other attention, in every layout.

torch refuses the backward pass of FlexAttention on a CPU, because no kernels can be generated for
it. Without this check the reference of torch runs, which stores all scores. tests/gpu_model/
test_flex_kernels.py runs the kernels of a GPU.
"""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from megatron.core.transformer.enums import AttnMaskType

from frontier_llm.config import RunConfig
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.launch.world import World
from frontier_llm.model import build, flex
from frontier_llm.model.attention import attention_kernels
from tests.covering import covering
from tests.model.test_attention import random_qkv
from tests.model.test_relative import HEADS, REACH, dense, make_core
from tests.ranks import run_ranks
from tests.trainer.rig import make_rig, mean_losses
from tests.trainer.test_parity import compare
from tests.trainer.test_t5_parity import LAYOUTS, MODEL
from tests.values import TINY_T5, tiny_values

TOKENS = 2 * flex.BLOCK + 9


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use FlexAttention on the CPU."""
    monkeypatch.setattr(flex, "DEVICES", ("cpu",))
    monkeypatch.setattr(flex, "COMPILER", "aot_eager")
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    yield
    torch.compiler.reset()


def padding(*lengths: int) -> torch.Tensor:
    return torch.arange(TOKENS) < torch.tensor(lengths)[:, None]


CASES = {
    "causal": (True, HEADS, None),
    "both_sides": (False, HEADS, None),
    "padded": (False, HEADS, padding(TOKENS, flex.BLOCK)),
    "padded_inside_a_block": (False, HEADS, padding(7, flex.BLOCK + 1)),
    "a_sample_without_tokens": (False, HEADS, padding(TOKENS, 0)),
    "grouped_heads": (True, HEADS // 2, None),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_blocks_and_their_gradients(case: str, on_cpu: None) -> None:
    causal, groups, mask = CASES[case]
    table = torch.randn(2 * REACH + 1, HEADS, generator=torch.Generator().manual_seed(2))
    inputs = [*random_qkv(TOKENS, HEADS, groups), table.requires_grad_()]
    core = make_core(AttnMaskType.causal if causal else AttnMaskType.padding)
    scores = flex.FlexScores.of(table, TOKENS, mask, causal=causal)
    weight = torch.randn(TOKENS, 2, 8 * HEADS, generator=torch.Generator().manual_seed(1))
    results = []
    for bias in (scores, table):
        out = core(*inputs[:3], mask, bias)
        results.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_is_compiled_even_if_other_functions_are_not(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial of compiled functions turns torch.compile off in some steps."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    monkeypatch.setattr(flex, "COMPILER", backend)
    scores = flex.FlexScores.of(torch.zeros(3, HEADS), 5, None, causal=True)
    inputs = [x.permute(1, 2, 0, 3) for x in random_qkv(5, HEADS, HEADS)]
    with torch.compiler.set_stance("force_eager"):
        scores.attend(*inputs, None)
    assert len(compiled) == 1


@pytest.mark.parametrize("tokens", [5, flex.BLOCK, TOKENS])
def test_the_bias_has_one_number_per_distance(tokens: int) -> None:
    table = torch.randn(2 * REACH + 1, HEADS)
    bias = flex.FlexScores.of(table, tokens, None, causal=False).bias
    assert bias.shape == (HEADS, 2 * tokens - 1)
    at = torch.arange(tokens)
    expected = dense(table, tokens, tokens)
    assert torch.equal(bias[:, at[None, :] - at[:, None] + tokens - 1], expected)


def test_masked_blocks_are_skipped() -> None:
    table = torch.zeros(2 * REACH + 1, HEADS)
    causal = flex.FlexScores.of(table, TOKENS, None, causal=True).blocks
    assert causal is not None
    assert causal.to_dense()[0, 0].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert causal.kv_num_blocks.tolist() == [[[1, 1, 1]]]  # those on the diagonal
    mask = padding(TOKENS, flex.BLOCK, flex.BLOCK + 1)
    padded = flex.FlexScores.of(table, TOKENS, mask, causal=False).blocks
    assert padded is not None
    assert padded.to_dense()[:, 0, 0].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert padded.full_kv_num_blocks is not None
    assert padded.full_kv_num_blocks[:, 0, 0].tolist() == [2, 1, 1]
    # a block that is in both lists would be counted twice
    assert padded.kv_num_blocks[:, 0, 0].tolist() == [1, 0, 1]


LAYOUT_CASES = {
    "tensor2_sequence_selective": (*LAYOUTS["tensor2_sequence"], "recompute=selective"),
    "in_encoder_full": (*LAYOUTS["in_encoder"], "recompute=full"),
    "chunks2": (*LAYOUTS["chunks2"], "recompute=none"),
    "zero3": (2, ["sharding=zero3"], "kernels=torch"),
    "compiled": (2, ["sharding=zero3"], "kernels=compiled"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", covering(LAYOUT_CASES, ["tensor2_sequence_selective", "chunks2", "zero3", "compiled"])
)
def test_a_layout_equals_one_process_without_it(
    case: str, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "COMPILER", "aot_eager")
    ranks, overrides, more = LAYOUT_CASES[case]
    compare(ranks, [*overrides, more, "attention=flex"], MODEL, 2)


@pytest.mark.slow
def test_a_gpt_with_windows_and_documents_equals_one_without_it(on_cpu: None) -> None:
    model = ["model.head_dim=16", "data.documents=separate", "model.window=4"]
    model += ["model.attention_softcap=0.5", "model.positions=rotary"]
    compare(1, ["attention=flex"], [*model, "model.layers=2", "data.global_batch=1"], 1)


def uses(world: World, values: dict) -> tuple[int, int]:
    """Return how often FlexAttention is called in a training step, and in an evaluation."""
    calls, attend = [], flex.FlexScores.attend

    def count(*arguments: object) -> torch.Tensor:
        calls.append(1)
        return attend(*arguments)  # type: ignore[arg-type]

    flex.FlexScores.attend = count  # type: ignore[method-assign,assignment]
    rig = make_rig(world, values)
    rig.train(1)
    trained = len(calls)
    with torch.no_grad():
        losses = mean_losses(rig.step._pipeline, rig.batches(0))
    assert all(math.isfinite(loss.item()) for loss in losses)
    return trained, len(calls) - trained


@pytest.mark.slow
def test_it_is_used_in_training_only(on_cpu: None) -> None:
    values = tiny_values(*MODEL, "attention=flex")
    micro_batches, layers = 2, 4
    assert run_ranks(uses, 1, values)[0] == (micro_batches * layers, 0)


def test_a_cpu_says_that_it_does_not_use_it() -> None:
    config = RunConfig.model_validate(tiny_values(*TINY_T5, "attention=flex"))
    layout = ResolvedLayout.resolve(config, 1, 1, precision="fp32", check_rules=False)
    found = attention_kernels(layout, torch.device("cpu"))
    assert found["encoder"] == "math, in blocks of queries (attention=flex is for GPUs)"
    assert found["cross"] == "flash"


def test_the_start_of_a_run_names_it(on_cpu: None) -> None:
    config = RunConfig.model_validate(tiny_values(*TINY_T5, "attention=flex"))
    layout = ResolvedLayout.resolve(config, 1, 1, precision="fp32", check_rules=False)
    assert attention_kernels(layout, torch.device("cpu")) == {
        "encoder": "FlexAttention, as attention=flex asks for",
        "decoder": "FlexAttention, as attention=flex asks for",
        "cross": "flash",
    }
