"""The effect of `kernels` on predicted times, against counted bytes and a published comparison."""

import pytest

from frontier_llm.cli.experiments import composed
from frontier_llm.planner.block import chunk_blocks
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.compute import elementwise_factor
from frontier_llm.planner.step_time import step_time

COUNTED = {"torch": 4.11, "fused": 4.11, "elementwise": 1.93, "compiled": 1.94}
"""GB that a layer of LLaMA-7B moves with 4,096 tokens (docs/gpu.md, kernels of a layer)."""
EAGER, COMPILED = 5762, 6667
"""Tokens per second and GPU of torchtitan with FSDP on 8 H100: Llama 3.1 8B, local batch 2, 8,192
tokens, selective recomputation (benchmarks/llama3_h100_202412_torchtitan.md, December 2024). Their
H100 have HBM2e with 2.4 TB/s."""
TITAN = (
    "model=llama3_8b", "cluster=h100_8", "cluster.device.memory_gb_per_second=2400",
    "sharding=zero3", "recompute=selective", "precision=bf16", "data.sequence_length=8192",
    "data.micro_batch=2", "data.global_batch=16",
)  # fmt: skip


def _seconds(*overrides, ranks=8):
    return step_time(Candidate.of(composed(*overrides), ranks, 8)).seconds


def _factor(config, kernels):
    layout = Candidate.of(config, 1, 1).layout
    ((block, _),) = chunk_blocks(layout, layout.model_chunks[0])
    factor = elementwise_factor(block, config.planner.engine, kernels)
    return block.moved_elements * layout.compute_bytes, factor


@pytest.mark.parametrize(("kernels", "counted"), COUNTED.items())
def test_a_layer_moves_the_bytes_that_its_code_moves(kernels, counted):
    config = composed(
        "model=llama_7b", "cluster=h200_8", "precision=bf16", "data.sequence_length=4096",
        "data.micro_batch=1", "data.global_batch=1", "launch.ranks=1",
    )  # fmt: skip
    forward, factor = _factor(config, kernels)
    assert 3 * forward * factor / 1e9 == pytest.approx(counted, rel=0.01)


def test_without_rotary_positions_biases_and_gates_nothing_is_left_to_compile():
    config = composed("model.bias=false", "precision=bf16", "parallel.pipeline=1")
    assert _factor(config, "torch") == _factor(config, "elementwise")


def test_the_fitted_factor_applies_to_auto_and_to_other_programs():
    for engine, kinds in (("ours", ("auto", "fastest")), ("fsdp", ("auto", *COUNTED))):
        config = composed(f"planner.engine={engine}", "parallel.pipeline=1")
        fitted = config.planner.engine.elementwise_factor
        assert fitted > 1.2
        assert {_factor(config, kernels)[1] for kernels in kinds} == {fitted}


def test_compiled_functions_explain_half_of_the_gain_that_torchtitan_published():
    seconds = {name: _seconds(*TITAN, f"kernels={name}") for name in ("auto", *COUNTED)}
    assert seconds["elementwise"] < seconds["compiled"] < seconds["auto"] < seconds["torch"]
    gain = seconds["torch"] / seconds["compiled"] - 1
    assert 0.4 < gain / (COMPILED / EAGER - 1) < 1


def test_compiled_layers_read_each_gradient_once_more_to_add_it():
    parts = [_seconds(*TITAN, f"kernels={kernels}") for kernels in ("elementwise", "compiled")]
    # 2 bytes of 8.03e9 parameters at 0.6955 of 2.4 TB/s
    assert parts[1] - parts[0] == pytest.approx(2 * 8.03e9 / (0.6955 * 2.4e12), rel=0.1)
