"""Print the attention kernels that torch chooses on a GPU for every model of conf/model, as JSON.

The chip is that of the environment variable FAKE_CUDA_CAPABILITY (cuda_stub.c).
"""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._subclasses.fake_tensor as fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from frontier_llm.cli.compose import compose
from frontier_llm.config import decode
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.attention_kernels import attention_kernels

KERNELS = {
    "aten._scaled_dot_product_flash_attention.default": SDPBackend.FLASH_ATTENTION,
    "aten._scaled_dot_product_efficient_attention.default": SDPBackend.EFFICIENT_ATTENTION,
    "aten._scaled_dot_product_cudnn_attention.default": SDPBackend.CUDNN_ATTENTION,
}
MODELS = sorted(
    path.stem for path in Path("conf/model").glob("*.yaml") if "_" in path.stem
)  # the others are defaults of a family
GPU = torch.device("cuda", 0)


class _Recorder(TorchDispatchMode):
    """Records the operations that have one of the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[SDPBackend] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in KERNELS:
            self.found.append(KERNELS[str(func)])
        return func(*args, **(kwargs or {}))


def choose_by_call(**call: Any) -> int:
    """Return the kernel that torch starts; without memory, `torch._fused_sdp_choice` says math."""
    with _Recorder() as recorder:
        torch.nn.functional.scaled_dot_product_attention(**call)
    return (recorder.found or [SDPBackend.MATH])[0].value


def chosen(model: str) -> dict[str, str]:
    """Return the kernel of each kind of attention of a model in bf16."""
    data = ["data=stdlib_spans"] if model.startswith(("mt5", "t5gemma")) else []
    if model.startswith(("mistral", "gemma")):  # windows do not hold the whole sample
        data = ["data.sequence_length=8192"]
    config = decode(compose(["plan=off", f"model={model}", "parallel.pipeline=1", *data]))
    layout = ResolvedLayout.resolve(config, 1, 1, precision="bf16", check_rules=False)
    with (
        mock.patch.object(fake_tensor, "init_gpu_context"),
        mock.patch.object(torch, "_fused_sdp_choice", choose_by_call),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        return attention_kernels(layout, GPU)


if __name__ == "__main__":
    print(json.dumps({model: chosen(model) for model in MODELS}))  # noqa: T201
