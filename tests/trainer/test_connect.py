"""The library that sends messages, by device and configuration."""

import pytest
import torch

from frontier_llm.config import decode
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.errors import ConfigError
from frontier_llm.trainer.connect import choose_backend
from tests.values import tiny_values

CPU = Accelerator(torch.device("cpu"), "cpu", "cpu")
GPU = Accelerator(torch.device("cuda", 0), "cuda", "NVIDIA Z1")


def _config(*overrides: str):
    return decode(tiny_values(*overrides))


@pytest.mark.parametrize(
    ("device", "wanted", "chosen"),
    [
        (CPU, "auto", "gloo"),
        (CPU, "gloo", "gloo"),
        (GPU, "auto", "nccl"),
        (GPU, "nccl", "nccl"),
        (GPU, "gloo", "gloo"),
    ],
)
def test_the_library_follows_from_the_device_unless_it_is_set(device, wanted, chosen):
    assert choose_backend(_config(f"collectives.backend={wanted}"), device) == chosen


def test_nccl_needs_a_gpu():
    with pytest.raises(ConfigError, match="without a GPU"):
        choose_backend(_config("collectives.backend=nccl"), CPU)


def test_gloo_has_no_pipeline_between_gpus():
    config = _config("collectives.backend=gloo", "parallel.pipeline=2")
    assert choose_backend(config, CPU) == "gloo"
    with pytest.raises(ConfigError, match=r"from stage to stage"):
        choose_backend(config, GPU)
