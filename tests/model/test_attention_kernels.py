"""The kernels of a model's attention are known before the first step."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from frontier_llm.config import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.attention_kernels import attention_kernels
from tests.values import TINY_T5, tiny_values

CPU = torch.device("cpu")


def layout(*overrides: str) -> ResolvedLayout:
    config = RunConfig.model_validate(tiny_values(*overrides))
    return ResolvedLayout.resolve(config, 1, 1, precision="fp32", check_rules=False)


def test_each_kind_of_attention_has_a_kernel() -> None:
    assert attention_kernels(layout(), CPU) == {"causal": "flash"}
    assert attention_kernels(layout("model.kv_heads=2"), CPU) == {"causal": "flash"}


def test_with_dropout_a_cpu_computes_blocks_of_queries() -> None:
    found = attention_kernels(layout("model.attention_dropout=0.1"), CPU)
    assert found["causal"].endswith("in blocks of queries")


def test_an_encoder_decoder_has_three_kinds() -> None:
    found = attention_kernels(layout(*TINY_T5), CPU)
    assert list(found) == ["encoder", "decoder", "cross"]
    assert found["encoder"] == "math, in blocks of queries"
    assert found["cross"] == "flash"
    rotary = attention_kernels(
        layout(*TINY_T5, "model.positions=rotary", "model.window=4", "model.window_every=2"), CPU
    )
    assert list(rotary) == [
        "encoder, window of 4 tokens", "encoder", "decoder, window of 4 tokens", "cross", "decoder",
    ]  # fmt: skip


def test_whole_matrices_are_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is a GPU by its name only: no tensor is made on it."""
    gpu = torch.device("cuda", 0)
    calls = []

    def choose(**call: object) -> int:
        calls.append(call)
        return SDPBackend.MATH.value

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device, **kw: empty(*size, **kw))
    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Z1")
    with pytest.raises(ConfigError, match="no attention kernel on NVIDIA Z1"):
        attention_kernels(layout(), gpu)
    assert calls[0]["is_causal"] is True


def test_windows_and_capped_scores_are_computed_in_blocks() -> None:
    found = attention_kernels(layout("model.window=4", "model.window_every=2"), CPU)
    assert found == {"window of 4 tokens": "flash, in blocks of queries", "causal": "flash"}
    found = attention_kernels(layout("model.attention_softcap=20.0"), CPU)
    assert found == {"causal": "matrix products, in blocks of queries"}
    found = attention_kernels(layout("data.documents=separate", "model.window=4"), CPU)
    both = "flash, in blocks of queries, one document at a time"
    assert found == {"window of 4 tokens": both}
