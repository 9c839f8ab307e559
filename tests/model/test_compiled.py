"""Compiled layers and functions give the numbers of one process, and are compiled once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.launch.world import World
from frontier_llm.model import build, linear
from frontier_llm.model.transformer import transformer_config
from tests.ranks import run_ranks
from tests.trainer.rig import make_rig, mean_losses
from tests.trainer.test_parity import MODELS, compare
from tests.values import T5GEMMA2, TINY_T5, tiny_values

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    """Load the compiler once, before ranks are forked: that takes longer than their graphs."""
    import torch._inductor.compile_fx

    small = torch.compile(lambda x: x.sin().sum(), backend="aot_eager")
    small(torch.ones(2, requires_grad=True)).backward()


FEW = "model.layers=2"
"""A second layer shows whether the first one's code is used again; more only take longer."""
LAYOUTS = {
    "zero3_recompute": (2, ["sharding=zero3", "recompute=full", FEW]),
    "tensor_sequence_selective": (
        2, ["parallel.tensor=2", "parallel.sequence=true", "recompute=selective", FEW],
    ),
    "interleaved_zero2": (
        4,
        ["parallel.pipeline=2", "parallel.chunks=2", "sharding=zero2", "data.global_batch=8"],
    ),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compiled_layout_equals_one_process(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs are captured and differentiated as always, but run by torch's own kernels."""
    monkeypatch.setattr(build, "COMPILER", "aot_eager")
    ranks, overrides = LAYOUTS[layout]
    compare(ranks, [*overrides, "kernels=compiled"], MODELS["untied_gqa_swiglu"], 2)


def train_and_evaluate(world: World, kernels: str) -> tuple[list[float], dict[str, int]]:
    """Train two steps, evaluate and generate; return the losses, and what was compiled.

    Which functions are captured does not depend on the compiler that gets their graphs. Here
    torch's own kernels run them, which saves the time to compile.
    """
    from torch._dynamo.utils import counters

    torch.compile = partial(torch.compile, backend="aot_eager")
    counters.clear()  # other tests of this process may have compiled something
    llama = MODELS["untied_gqa_swiglu"]
    rig = make_rig(world, tiny_values(f"kernels={kernels}", "model.layers=3", *llama))
    losses = [result.loss for result in rig.train(2)]
    losses += [loss.item() for loss in mean_losses(rig.step._pipeline, rig.batches(0))]
    rig.step._pipeline.logits(rig.batches(0)[0], 0)
    counts = {"graphs": counters["stats"]["unique_graphs"], "breaks": len(counters["graph_break"])}
    return losses, counts


@pytest.mark.parametrize(
    ("kernels", "graphs"),
    [
        pytest.param("compiled", 2, marks=pytest.mark.exhaustive),  # in training and in evaluation
        ("elementwise", 3),  # rotary positions, an activation, and its backward pass
    ],
)
def test_code_is_compiled_once_and_whole(kernels: str, graphs: int) -> None:
    """The same graphs serve all three layers; logits need none."""
    (expected, none), (losses, counts) = (
        run_ranks(train_and_evaluate, 1, name, timeout=300)[0] for name in ("torch", kernels)
    )
    assert none == {"graphs": 0, "breaks": 0}
    assert counts == {"graphs": graphs, "breaks": 0}
    assert losses == pytest.approx(expected, rel=1e-5)


def count_compiled_as_on_a_gpu(world: World, kernels: str, model: tuple[str, ...]) -> int:
    """Train a step on a CPU with megatron's settings of a GPU; count the calls of torch.compile."""
    calls = []

    def compile_nothing(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        calls.append(function)
        return function

    def config_of_a_gpu(layout: ResolvedLayout, _: torch.device, **options: bool) -> Any:
        config = transformer_config(layout, torch.device("cuda"), **options)
        config.use_cpu_initialization = True
        return config

    torch.compile = compile_nothing
    build.transformer_config = config_of_a_gpu
    linear.fuses_bias = lambda *_: False
    make_rig(world, tiny_values(f"kernels={kernels}", *model)).train(1)
    return len(calls)


@pytest.mark.parametrize("model", MODELS)
def test_only_the_kernels_that_compile_call_the_compiler_on_a_gpu(model: str) -> None:
    """A GPU without a C compiler can run all others."""
    torch_calls, compiled_calls = (
        run_ranks(count_compiled_as_on_a_gpu, 1, kernels, tuple(MODELS[model]))[0]
        for kernels in ("torch", "elementwise")
    )
    assert torch_calls == 0
    assert compiled_calls > 0


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [(1, []), pytest.param(*LAYOUTS["tensor_sequence_selective"], marks=pytest.mark.exhaustive)],
    ids=["one", "tensor_sequence_selective"],
)
def test_compiled_functions_equal_one_process(ranks: int, overrides: list[str]) -> None:
    """With the compiler of a real run, which each rank calls anew."""
    compare(ranks, [*overrides, FEW, "kernels=elementwise"], MODELS["untied_gqa_swiglu"], 2)


@pytest.mark.exhaustive
def test_compiled_functions_of_an_encoder_decoder_equal_one_process() -> None:
    compare(2, ["sharding=zero3", "recompute=full", "kernels=elementwise"], [*TINY_T5], 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", [TINY_T5, T5GEMMA2], ids=["t5", "t5gemma2"])
def test_an_encoder_decoder_can_be_compiled(
    model: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "COMPILER", "aot_eager")
    compare(2, ["sharding=zero3", "kernels=compiled"], [*model, "optimizer.epsilon=1e-3"], 2)
