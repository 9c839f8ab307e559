"""Models of transformers train as in one process, with each kind of recomputation."""

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from frontier_llm.library import AdamW, shard
from tests.covering import covering
from tests.engine.reference import (
    Batch,
    Behaviour,
    Trained,
    attempt,
    built,
    differences,
    in_one_process,
    on_one_start,
    outcome,
)

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = dict(vocab_size=64, hidden_size=32, intermediate_size=48)
LAYERS: dict[str, Any] = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
T5: dict[str, Any] = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
GPT2: dict[str, Any] = dict(n_positions=16, n_embd=32, n_layer=2, n_head=4)
NO_DROPOUT: dict[str, Any] = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, **LAYERS, tie_word_embeddings=True)
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SIZES, **LAYERS, head_dim=12)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, **GPT2, **NO_DROPOUT)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, **T5, dropout_rate=0.0, decoder_start_token_id=0)
    ),
}
RECOMPUTED = {"": None, "recomputed": False, "recomputed, reentrant": True}
KEY_BIAS = ("c_attn.bias",)
"""The gradient of the part for keys is 0 but for rounding, which Adam makes as large as others."""


def loss_of(module: nn.Module, batch: Batch) -> torch.Tensor:
    tokens = (batch.x * 10).long().abs() % 64
    loss: torch.Tensor = module(input_ids=tokens, labels=tokens).loss
    return loss


def make(model: str, kind: str) -> nn.Module:
    module = MODELS[model]()
    if kind:
        module.gradient_checkpointing_enable({"use_reentrant": RECOMPUTED[kind]})
    return module


CASES = {
    (model, kind, params): Behaviour(
        functools.partial(make, model, kind),
        loss_of,
        # small numbers would amplify the rounding of small gradients
        update=lambda module: AdamW(epsilon=1e-5),
        noise=KEY_BIAS,
    )
    for model in MODELS
    for kind in RECOMPUTED
    for params in (1, 2, 4)
}
USUAL = [
    ("llama", "", 1), ("llama", "recomputed, reentrant", 2), ("qwen3", "recomputed", 4),
    ("gpt2", "", 4), ("t5", "", 2),
]  # fmt: skip


@functools.cache
def reference(model: str) -> Trained:
    return in_one_process(CASES[model, "", 1])


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """Import once what a model needs, and not on each rank."""
    make("llama", "")


@functools.cache
def outcomes(is_usual: bool) -> dict[Any, tuple[Trained | str, ...]]:
    cases: dict[Any, tuple[Any, ...]] = {
        case: (behaviour, case[2])
        for case, behaviour in CASES.items()
        if (case in USUAL) == is_usual
    }
    return on_one_start(outcome, cases)


def generates_and_saves(params: int) -> None:
    """A sharded model generates the same tokens; in `gathered` it is saved as usual."""
    plain, module = (built(CASES["llama", "", 1]).eval() for _ in range(2))
    states = shard(module, params=params, ranks_per_node=2)
    prompt = torch.arange(6)[None]
    both = [model.generate(prompt, max_new_tokens=6, do_sample=False) for model in (plain, module)]
    assert torch.equal(*both)
    with tempfile.TemporaryDirectory() as folder, states.gathered():
        module.save_pretrained(folder)  # writes on rank 0 only
        if dist.get_rank():
            return
        loaded = transformers.LlamaForCausalLM.from_pretrained(folder)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])


@pytest.mark.parametrize("params", covering([1, 4], [1]))
def test_generating_and_saving(params: int) -> None:
    errors = on_one_start(attempt, {params: (generates_and_saves, params)})
    assert not any(errors[params]), errors[params][0]


@pytest.mark.parametrize(
    "case", covering(CASES, [case for case in CASES if case not in USUAL]), ids=str
)
def test_transformers(case: tuple[str, str, int]) -> None:
    for got in outcomes(case in USUAL)[case]:
        assert isinstance(got, Trained), got
        assert differences(CASES[case], got, reference(case[0])) == {}
