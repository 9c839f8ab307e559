"""MFU is printed only for a device that is known, and by its own peak."""

import logging
from dataclasses import replace
from typing import cast

import pytest
import torch

from frontier_llm.config.run import RunConfig
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.saving.checkpoints import Checkpoints
from frontier_llm.trainer.progress import Progress
from frontier_llm.trainer.step_meter import StepMeter, Throughput
from tests.values import tiny_values

CPU = Accelerator(torch.device("cpu"), "cpu", "cpu")


def gcd(name: str) -> Accelerator:
    return Accelerator(torch.device("cpu"), "hip", name)  # only its name is asked for


def make(accelerator: Accelerator, cluster: str, *overrides: str) -> Throughput:
    config = RunConfig.model_validate(tiny_values(f"cluster={cluster}", *overrides))
    return Throughput(config, 4, accelerator, "bf16")


def test_unknown_peak_is_no_mfu() -> None:
    speed = make(CPU, "cpu_laptop").of(1.0)
    assert speed.mfu is None
    assert speed.hfu is None
    assert speed.tokens_per_second == 8 * 16


@pytest.mark.parametrize(
    ("accelerator", "cluster"),
    [(CPU, "frontier_mi250x"), (gcd("AMD Instinct MI300X"), "frontier_mi250x")],
)
def test_peak_of_another_device_is_not_used(accelerator: Accelerator, cluster: str) -> None:
    throughput = make(accelerator, cluster)
    assert throughput.peak_tflops is None
    assert accelerator.name in throughput.peak_description


@pytest.mark.parametrize("logs", [True, False])
def test_an_impossible_mfu_is_withheld_and_reported_once(
    logs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    throughput = make(CPU, "cpu_laptop")
    meter = StepMeter(throughput, Progress(), cast(Checkpoints, None), logs=logs)
    with caplog.at_level(logging.ERROR, logger="frontier_llm"):
        speeds = [replace(throughput.of(1.0), mfu=0.9, hfu=hfu) for hfu in (1.2, 1.2, 0.95)]
        found = [meter.checked(speed) for speed in speeds]
    assert [(speed.mfu, speed.hfu) for speed in found] == [(0.9, None), (0.9, None), (0.9, 0.95)]
    assert len(caplog.records) == logs
    assert ("peak_tflops" in caplog.text) == logs


def test_peak_of_a_gcd_and_recomputation_counts_only_as_hardware() -> None:
    throughput = make(gcd("AMD Instinct MI250X"), "frontier_mi250x", "recompute=full")
    assert throughput.peak_tflops == 191.5
    speed = throughput.of(1e-3)
    assert speed.mfu == pytest.approx(speed.model_tflops_per_device / 191.5)
    assert speed.hfu is not None
    assert speed.mfu is not None
    assert speed.mfu < speed.hfu < speed.mfu * 4 / 3
