"""No model of conf/ has attention without a kernel on an A100 or an H100."""

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
def test_every_model_has_an_attention_kernel(capability: str, kernel: str) -> None:
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
    window = {"window of 4096 tokens": f"{masked}, in blocks of queries"}
    for model, kernels in chosen.items():
        if model.startswith("mt5"):
            assert kernels == {"encoder": relative, "decoder": relative, "cross": masked}, model
        else:
            assert kernels == (window if model == "mistral_7b" else {"causal": kernel}), model
