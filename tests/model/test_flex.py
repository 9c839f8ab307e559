"""FlexAttention gives the numbers of the other attention, in every layout.

torch refuses the backward pass of FlexAttention on a CPU, because no kernels can be generated for
it. Without this check the reference of torch runs, which stores all scores. tests/gpu_model/
test_flex_kernels.py runs the kernels of a GPU.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex

from frontier_llm.config import RunConfig
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.launch.world import World
from frontier_llm.model import build, flex
from frontier_llm.model.attention_kernels import attention_kernels
from frontier_llm.model.flex import FlexKernel
from frontier_llm.model.reads import Documents, Reads, Scores
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


def padding(*lengths: int) -> Reads:
    is_token = torch.arange(TOKENS) < torch.tensor(lengths)[:, None]
    return Reads(keys=Documents.padded(is_token))


CAUSAL = Reads(after=1)
CASES = {
    "causal": (CAUSAL, HEADS),
    "both_sides": (Reads(), HEADS),
    "window": (Reads(30, 40), HEADS),
    "padded": (padding(TOKENS, flex.BLOCK), HEADS),
    "padded_inside_a_block": (padding(7, flex.BLOCK + 1), HEADS),
    "a_sample_without_tokens": (padding(TOKENS, 0), HEADS),
    "grouped_heads": (CAUSAL, HEADS // 2),
}


def kernel_of(reads: Reads, tokens: int, table: torch.Tensor) -> FlexKernel:
    return FlexKernel.of(reads, tokens, torch.device("cpu"), table)


@pytest.mark.parametrize(
    "case", covering(CASES, ["both_sides", "padded", "a_sample_without_tokens", "grouped_heads"])
)
def test_equals_blocks_and_their_gradients(case: str, on_cpu: None) -> None:
    reads, groups = CASES[case]
    table = torch.randn(2 * REACH + 1, HEADS, generator=torch.Generator().manual_seed(2))
    inputs = [*random_qkv(TOKENS, HEADS, groups), table.requires_grad_()]
    core = make_core()
    weight = torch.randn(TOKENS, 2, 8 * HEADS, generator=torch.Generator().manual_seed(1))
    results = []
    for used in (replace(reads, kernel=kernel_of(reads, TOKENS, table)), reads):
        out = core(*inputs[:3], used, table)
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
    kernel = kernel_of(CAUSAL, 5, torch.zeros(3, HEADS))
    inputs = [x.permute(1, 2, 0, 3) for x in random_qkv(5, HEADS, HEADS)]
    with torch.compiler.set_stance("force_eager"):
        kernel.attend(*inputs, CAUSAL, Scores())
    assert len(compiled) == 1


@pytest.mark.parametrize("tokens", [5, flex.BLOCK, TOKENS])
def test_the_bias_has_one_number_per_distance(tokens: int) -> None:
    table = torch.randn(2 * REACH + 1, HEADS)
    bias = kernel_of(Reads(), tokens, table).bias
    assert bias is not None
    assert bias.shape == (HEADS, 2 * tokens - 1)
    at = torch.arange(tokens)
    expected = dense(table, tokens, tokens)
    assert torch.equal(bias[:, at[None, :] - at[:, None] + tokens - 1], expected)


def test_masked_blocks_are_skipped() -> None:
    table = torch.zeros(2 * REACH + 1, HEADS)
    causal = kernel_of(CAUSAL, TOKENS, table).blocks
    assert causal is not None
    assert causal.to_dense()[0, 0].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert causal.kv_num_blocks.tolist() == [[[1, 1, 1]]]  # those on the diagonal
    padded = kernel_of(padding(TOKENS, flex.BLOCK, flex.BLOCK + 1), TOKENS, table).blocks
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
    calls, attend = [], FlexKernel.attend

    def count(*arguments: object) -> torch.Tensor:
        calls.append(1)
        return attend(*arguments)  # type: ignore[arg-type]

    FlexKernel.attend = count  # type: ignore[method-assign,assignment]
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
