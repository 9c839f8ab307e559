"""A pass takes as long as its work on the CPU, if that is longer than on the device."""

import pytest

from frontier_llm.cli.experiments import composed
from frontier_llm.config.engine import EngineConfig, HostTimes
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.compute import Host, host_times, with_host
from frontier_llm.planner.step_time import step_time


@pytest.mark.parametrize(("device", "host"), [(1.0, 0.1), (0.1, 1.0), (3.0, 0.0), (0.0, 0.0)])
def test_the_longer_time_counts(device, host):
    assert with_host(device, host) == pytest.approx(max(device, host), rel=1e-4)


def test_equal_times_add_a_little():
    assert with_host(1.0, 1.0) == pytest.approx(2 ** (1 / 5))


def test_tensor_ranks_cost_the_host_more():
    times = HostTimes()
    layer = [Host(times, ranks).layer_seconds * 1e6 for ranks in (1, 2, 8)]
    assert layer[0] == pytest.approx(times.layer_us)
    assert layer[1] == pytest.approx(times.layer_us + times.tensor_us + times.tensor_rank_us)
    assert layer[2] == pytest.approx(layer[1] + 6 * times.tensor_rank_us)


def _parts(cluster, precision, **host):
    config = composed(
        "model=gpt_125m", "data=text", "data.path=/x", f"cluster={cluster}",
        f"precision={precision}", "parallel.pipeline=1", "data.global_batch=16",
        "data.sequence_length=128", *(f"planner.engine.host.{k}={v}" for k, v in host.items()),
    )  # fmt: skip
    return step_time(Candidate.of(config, 4, 4)).parts


def test_small_layers_wait_for_the_host():
    slow, fast = (_parts("a100_80g", "bf16", layer_us=us) for us in (2000, 200))
    assert slow["host"] > 2 * fast["host"] > 0
    assert slow["compute"] == fast["compute"]


def test_a_cpu_does_not_wait_for_itself():
    assert _parts("cpu_laptop", "fp32")["host"] == 0


def test_on_a_cpu_measured_times_are_added():
    measured = "+cluster.device.calibration.host.fp32"
    overrides = (f"{measured}={{layer_us:1000,backward_share:2,micro_batch_us:0,step_us:7}}",)
    config = composed(
        "model=gpt_125m", "data=text", "data.path=/x", "cluster=cpu_laptop", "precision=fp32",
        "parallel.pipeline=1", "data.global_batch=16", "data.sequence_length=128", *overrides,
    )  # fmt: skip
    candidate = Candidate.of(config, 4, 4)
    without = _parts("cpu_laptop", "fp32")
    parts = step_time(candidate).parts
    # a micro-batch, 12 layers, forward and twice as long backward
    expected = candidate.layout.micro_batches * 12 * 3e-3
    assert parts["host"] == pytest.approx(expected)
    assert parts["compute"] == without["compute"]
    assert parts["update"] == pytest.approx(without["update"] + 7e-6)


def test_measured_times_are_those_of_this_program():
    device = composed("cluster=a100_80g").cluster.device
    times = HostTimes(layer_us=1)
    calibration = device.calibration.model_copy(update={"host": {"fp32": times}})
    device = device.model_copy(update={"calibration": calibration})
    other = EngineConfig(name="other")
    assert host_times(device, EngineConfig(), "fp32") == times
    assert host_times(device, EngineConfig(), "bf16") == EngineConfig().host
    assert host_times(device, other, "fp32") == other.host


def test_the_defaults_of_older_runs_are_those_of_this_program():
    ours = composed().planner.engine
    assert EngineConfig(source=ours.source) == ours
