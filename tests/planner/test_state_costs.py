"""The seconds to quantise and dequantise messages, against the bytes that the kernels move."""

import pytest

from frontier_llm.cli.experiments import composed
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.layout_time import LayoutTime
from frontier_llm.planner.state_costs import StateCosts
from frontier_llm.planner.step_time import step_time


def _costs(*overrides, ranks=16):
    config = composed(
        "experiment=amsp_llama_7b", "sharding=zero3", "data.global_batch=16", *overrides
    )
    candidate = Candidate.of(config, ranks, 8)
    time = LayoutTime(candidate)
    kind = time.passes[0].kind
    costs = StateCosts(candidate, kind, time.groups, time.engine, time.speed)
    messages = sum(count for _, count in kind.units)
    return costs, lambda moved_bytes: time.speed.moved(moved_bytes, 2 * messages)


def test_plain_messages_are_not_converted():
    conversions = _costs()[0].conversions
    assert set(vars(conversions).values()) == {0.0}


def test_a_gather_quantises_one_part_and_dequantises_all():
    costs, moved = _costs("collectives=zeropp")
    n, bits = costs.elements, 8 + 16 / 256  # a scale of 16 bits per block of 256 elements
    expected = moved((n + n / 16) * (2 + bits / 8))
    assert costs.conversions.gather == pytest.approx(expected)
    assert costs.conversions.gather_again == pytest.approx(expected)
    assert costs.conversions.refresh == 0, "zero3 stores no other parameters than it updates"


def test_measured_kernels_decide_how_long_conversions_take():
    kernels = "attention_tflops: 100, attention_backward_tflops: 80, weight_gradient_ratio: 1"
    key = "+cluster.device.calibration.kernels.bf16"
    full, slow = (
        _costs("collectives=zeropp", f"{key}={{{kernels},elementwise_gb_per_second: 900{more}}}")[0]
        for more in ("", ",quantise_gb_per_second: 100")
    )
    share = full.conversions.gather / slow.conversions.gather
    assert share == pytest.approx(100 / (2039 * 0.6955), rel=0.1)


def test_a_scatter_quantises_and_adds_the_parts_of_the_other_ranks():
    costs, moved = _costs("collectives=zeropp")
    n, scale = costs.elements, 2 / 256
    in_node = moved(7 / 8 * n * (4 + 2 * (1 + scale)) + 8 * n / 8)  # int8
    between = moved(1 / 2 * n / 8 * (4 + 2 * (1 / 2 + scale)) + 8 * n / 16)  # int4, of n / 8
    assert costs.conversions.scatter == pytest.approx(in_node + between)
    assert costs.conversions.sums == 0


def test_gradients_of_zero1_are_quantised_once_per_step():
    costs, moved = _costs("collectives=zeropp", "sharding=zero1")
    n = costs.elements
    assert (costs.conversions.gather, costs.conversions.scatter) == (0, 0)
    assert costs.conversions.sums > 0
    assert costs.conversions.refresh == pytest.approx(moved((n + n / 16) * (2 + 1 + 2 / 256)))


def test_sums_over_replicas_are_sent_in_their_format_and_converted():
    factors = ("sharding=amsp_1_1_8",)  # a replica on each of two nodes
    plain, _ = _costs(*factors, "collectives=plain")
    two_bytes, _ = _costs(*factors, "collectives.sums_format=bf16")
    integers, moved = _costs(*factors, "collectives.sums_format=int4")
    assert two_bytes.sums.seconds == pytest.approx(plain.sums.seconds / 2, rel=0.3)
    assert integers.sums.seconds < two_bytes.sums.seconds / 2
    n, sent_bytes = integers.elements / 8, (4 + 16 / 256) / 8
    scattered = moved(n / 2 * (4 + 2 * sent_bytes) + 8 * n / 2)
    gathered = moved((n + n / 2) * (4 + sent_bytes))
    assert integers.conversions.sums == pytest.approx(scattered + gathered)
    for engine in ("deepspeed", "megatron_core"):
        theirs, _ = _costs(*factors, f"planner.engine={engine}", "collectives.sums_format=int4")
        same, _ = _costs(*factors, f"planner.engine={engine}")
        assert theirs.sums == same.sums, "another program has a format of its own"


def test_fsdp_sums_over_replicas_in_the_format_of_its_reductions():
    """MixedPrecision.reduce_dtype decides both; NCCL's rings send what a sum has per element."""
    hybrid = "planner.engine=fsdp", "sharding=mics", "sharding.params=8", "sharding.grads=8"
    hybrid += "sharding.optimizer=8", "collectives.sums_format=fp32"
    four, two = (
        _costs(*hybrid, f"collectives.grads_format={form}")[0].sums.seconds
        for form in ("fp32", "bf16")
    )
    assert two == pytest.approx(four / 2, rel=0.1)
    given, _ = _costs(*hybrid, "collectives.grads_format=bf16", "planner.engine.sums_bytes=4")
    assert given.sums.seconds == pytest.approx(four, rel=0.01)


def test_conversions_are_part_of_a_step_and_no_communication():
    config = composed("experiment=amsp_llama_7b", "sharding=zero3", "collectives=zeropp")
    candidate = Candidate.of(config, 1024, 8)
    time = LayoutTime(candidate)
    costs = StateCosts(candidate, time.passes[0].kind, time.groups, time.engine, time.speed)
    step, converted = step_time(candidate, time), costs.conversions
    in_step = step.parts["gather_params"] + step.parts["reduce_grads"]
    sent = sum(seconds for link, seconds in step.exposed.items() if link != "")
    per_micro_batch = converted.gather + converted.gather_again + converted.scatter
    expected = candidate.layout.micro_batches * per_micro_batch
    rest = step.parts["reduce_states"] + step.parts["refresh_params"]
    assert in_step + rest - sent == pytest.approx(expected + converted.sums + converted.refresh)
