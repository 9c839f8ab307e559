"""On an A100 or an H100, only models with capped scores have attention without a fused kernel."""

import json
import os
import subprocess
import sys

import pytest

from tests.gpu_model import fake_cuda
from tests.gpu_model.attention_choice import MODELS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not fake_cuda.PRELOADED, reason="run `make test-gpu-model`"),
]


@pytest.mark.parametrize(("capability", "kernel"), [("8", "flash"), ("9", "cuDNN")])
def test_each_model_has_the_kernel_of_its_scores(capability: str, kernel: str) -> None:
    """torch reads the capability of a GPU once per process."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu_model.attention_choice"],
        env={**os.environ, "FAKE_CUDA_CAPABILITY": capability},
        capture_output=True,
        text=True,
        check=True,
    )
    chosen = json.loads(ended.stdout)
    assert sorted(chosen) == MODELS
    relative = "memory-efficient, in blocks of queries"
    masked = kernel if capability == "9" else "memory-efficient"
    window = f"{masked}, in blocks of queries"
    for model, kernels in chosen.items():
        family = model.split("_")[0]
        if family == "mt5":
            assert kernels == {"encoder": relative, "decoder": relative, "cross": masked}, model
        elif family == "t5gemma2":
            assert {v for k, v in kernels.items() if "decoder" in k} == {window}, model
            assert set(kernels.values()) == {masked, window}, model
        elif family in ("gemma2", "t5gemma"):  # capped scores, which only FlexAttention fuses
            assert set(kernels.values()) == {"matrix products, in blocks of queries"}, model
        elif family == "gemma3":
            assert kernels.pop("causal") == kernel, model
            assert list(kernels.values()) == [window], model
        elif family == "mistral":
            assert kernels == {"window of 4096 tokens": window}, model
        else:
            assert kernels == {"causal": kernel}, model
