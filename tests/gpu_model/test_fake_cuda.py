"""A step of every layout on CUDA tensors: no operation mixes devices, the host waits once.

A step copies the addends of its all-reduce from page-locked memory to the device, and sums back.
"""

import re
from typing import Any

import pytest
import torch

from frontier_llm.parallel.stage_exchange import StageExchange
from tests.gpu_model import fake_cuda

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not fake_cuda.PRELOADED, reason="run `make test-gpu-model`"),
]

GPT = [
    "model=gpt", "model.layers=4", "model.hidden=256", "model.heads=4", "model.ffn=1024",
    "model.vocabulary=1000", "data.sequence_length=256", "data.micro_batch=2",
    "data.global_batch=32", "parallel.pipeline=1",
]  # fmt: skip
LLAMA = [
    "model=llama", "model.layers=4", "model.hidden=256", "model.heads=4", "model.kv_heads=2",
    "model.ffn=512", "model.vocabulary=1000", "data.sequence_length=256", "data.micro_batch=2",
    "data.global_batch=32", "parallel.pipeline=1",
]  # fmt: skip
T5 = ["model=mt5_tiny", "data=stdlib_spans", "parallel.pipeline=1", "data.sequence_length=256",
      "data.micro_batch=2", "data.global_batch=32"]  # fmt: skip
TENSOR = ["parallel.tensor=4", "parallel.sequence=true"]
DROPOUT = ["model.dropout=0.1", "model.attention_dropout=0.1"]
LAYOUTS = {
    "replicated": (GPT, 0),
    "zero1": ([*GPT, "sharding=zero1"], 1),
    "zero2": ([*GPT, "sharding=zero2"], 1),
    "zero3": ([*GPT, "sharding=zero3"], 1),
    "mics": ([*GPT, "sharding=mics", "launch.ranks_per_node=4"], 1),
    "zeropp": ([*GPT, "sharding=zeropp", "collectives=zeropp", "launch.ranks_per_node=4"], 1),
    "zero3_bf16_gradients": ([*GPT, "sharding=zero3", "collectives.grads_format=bf16"], 1),
    "tensor_sequence_recompute_dropout": (
        [*GPT, *TENSOR, *DROPOUT, "sharding=zero1", "recompute=full"], 1,
    ),
    "parallel_residual": ([*GPT, "model.residual=parallel", "sharding=zero2"], 3),
    "llama_selective": ([*LLAMA, "sharding=zero3", "recompute=selective"], 1),
    "t5_tensor_sequence_zero3": (
        [*T5, "parallel.tensor=2", "parallel.sequence=true", "sharding=zero3"], 1,
    ),
    "t5_recompute_zero2": ([*T5, "recompute=full", "sharding=zero2"], 1),
    "t5_flex_tensor_sequence_zero3": (
        [*T5, "parallel.tensor=2", "parallel.sequence=true", "sharding=zero3", "attention=flex"], 1,
    ),
    "t5_flex_recompute_stage": (
        [*T5[:2], *T5[3:], "parallel.pipeline=2", "recompute=full", "attention=flex"], 5,
    ),
    "first_stage": ([*GPT[:-1], "parallel.pipeline=4", "sharding=zero1"], 0),
    "middle_stage": ([*GPT[:-1], "parallel.pipeline=4", "sharding=zero3"], 3),
    "last_stage": ([*GPT[:-1], "parallel.pipeline=4", "sharding=zero3"], 7),
    "interleaved": (
        [*GPT[:-1], "parallel.pipeline=2", "parallel.chunks=2", "sharding=zero3"], 5,
    ),
    "folded": (
        [
            *GPT[:-1], "parallel.pipeline=2", "parallel.chunks=2", "parallel.schedule=zb_v",
            "sharding=zero3",
        ],
        1,
    ),
}  # fmt: skip


NAME_IN_DOCS = re.compile(r":(?:class|func):`torch\.(?:\w+\.)*(\w+)`")


def without_fixed_order() -> set[str]:
    """Return the operations that torch documents to raise in deterministic mode.

    They have the names of their CUDA operations: `nll_loss` for `torch.nn.NLLLoss`.
    """
    doc = str(torch.use_deterministic_algorithms.__doc__)
    section = doc.partition("operations will throw a\n")[2].partition("fill uninitialized")[0]
    names = NAME_IN_DOCS.findall(section)
    words = (re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name) for name in names)
    return {word.lower().strip("_") for word in words}


@pytest.mark.parametrize(
    "name",
    ["replicated", "zero3", "llama_selective", "t5_tensor_sequence_zero3",
     "tensor_sequence_recompute_dropout", "interleaved"],
)  # fmt: skip
def test_a_deterministic_step_has_no_operation_without_fixed_order(name: str) -> None:
    """Torch excludes cuDNN's attention by itself; the other operations that raise are not used."""
    refused = without_fixed_order()
    assert {"nll_loss", "cumsum", "put"} <= refused
    overrides, rank = LAYOUTS[name]
    recorded = fake_cuda.record_step([*overrides, "trainer.deterministic=true"], 8, rank)
    names = [name for name in recorded.kernels if name.startswith("aten.")]  # not generated ones
    used = {name.split(".")[1].strip("_") for name in names}
    bases = {re.sub(r"_(forward|backward)$", "", one) for one in used}
    assert bases & {"scaled_dot_product_flash_attention", "scaled_dot_product_efficient_attention"}
    assert not bases & (refused | {"scaled_dot_product_cudnn_attention"})
    assert (recorded.device_waits, recorded.host_waits) == (0, 1)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_host_waits_once_and_no_operation_mixes_devices(name: str, precision: str) -> None:
    overrides, rank = LAYOUTS[name]
    recorded = fake_cuda.record_step(overrides, 8, rank, precision)
    assert recorded.across_devices == {}
    assert recorded.device_waits == 0
    assert recorded.host_waits == 1
    assert (recorded.copies, recorded.blocking_copies) == (2, 0)
    assert recorded.kernels.total() > 100
    updates = [kernels["aten._fused_adamw_.default"]
               for kernels in (recorded.kernels, recorded.kernels_before_wait)]  # fmt: skip
    assert updates[0] == updates[1] > 0, "the host waits before it submits the update"


def test_a_wait_after_each_exchange_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A middle stage sends and receives activations and gradients."""
    launch = StageExchange.launch

    def launch_and_wait(*arguments: Any) -> None:
        launch(*arguments)
        torch.cuda.synchronize()

    monkeypatch.setattr(StageExchange, "launch", launch_and_wait)
    overrides, rank = LAYOUTS["middle_stage"]
    assert fake_cuda.record_step(overrides, 8, rank).device_waits > 10
