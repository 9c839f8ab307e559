"""The model and the samples of bench_library.py: a Llama of transformers with random weights."""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from frontier_llm.errors import ConfigError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

SEED = 1


def import_model() -> None:
    """Import the model's module once, before ranks are forked.

    Raises:
        ConfigError: transformers is not installed.
    """
    try:
        importlib.import_module("transformers.models.llama.modeling_llama")
    except ImportError as error:
        raise ConfigError(
            "transformers", str(error), "the library of the model",
            "pip install -e '.[convert]'",
        ) from error  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Dimensions of the model and of the samples."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    """Tokens per sample."""
    samples: int
    """Samples per rank and step."""


def build(shape: Shape) -> "LlamaForCausalLM":
    """Return the model in training mode, fp32, with the same weights on every rank.

    All weights are representable in bf16, so that a contender with bf16 parameters starts with the
    same values. The table of the tokens and the output layer are two parameters.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 11 // 4,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // 2,
        max_position_embeddings=shape.sequence,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def tokens_of(shape: Shape, rank: int, ranks: int, step: int) -> torch.Tensor:
    """Return [samples, sequence] int64: random tokens that depend on the rank and the step only."""
    generator = torch.Generator().manual_seed(SEED + step * ranks + rank)
    size = (shape.samples, shape.sequence)
    return torch.randint(shape.vocabulary, size, generator=generator)
