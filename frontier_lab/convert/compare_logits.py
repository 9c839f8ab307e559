"""Verify a conversion: run both models on the same tokens and compare the logits."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from frontier_lab.single_process_model import single_process_model
from frontier_llm.config import RunConfig
from frontier_llm.errors import DataError, install_command

TOLERANCE = 1e-4
"""Largest allowed difference of two fp32 logits, as a fraction of the largest absolute logit or of
1, whichever is larger."""
SAMPLES, TOKENS = 2, 64


@dataclass(frozen=True)
class Comparison:
    """The differences between the logits of two models."""

    largest: float
    mean: float
    scale: float
    """Largest absolute logit of their model, or 1 if that is larger."""

    @classmethod
    def of(cls, ours: Tensor, theirs: Tensor) -> "Comparison":
        """Compare two tensors of fp32 logits [samples, tokens, vocabulary]."""
        differences = (ours - theirs).abs()
        scale = max(1.0, theirs.abs().max().item())
        return cls(differences.max().item(), differences.mean().item(), scale)

    @property
    def passes(self) -> bool:
        """Whether the differences are so small that both are the same model; false for NaN."""
        return self.largest <= TOLERANCE * self.scale

    def __str__(self) -> str:
        return (
            f"logits differ by at most {self.largest:.2e}, {self.mean:.2e} on average; allowed "
            f"{TOLERANCE * self.scale:.2e} (largest logit {self.scale:.3g})"
        )


def compare(config: RunConfig, ours: Path, theirs: Path) -> Comparison:
    """Run both models in fp32 on the CPU on the same random tokens."""
    generator = torch.Generator().manual_seed(0)
    length = min(TOKENS, config.data.sequence_length)
    shape = (SAMPLES, length)
    tokens = torch.randint(config.model.vocabulary, shape, generator=generator)
    if config.model.kind == "t5":
        auto_class = "AutoModelForSeq2SeqLM"
        # encoder and decoder read different numbers of tokens, so exchanged inputs would fail
        read = tokens[:, : max(1, length * 3 // 4)].flip(1)
        own = {"encoder_tokens": tokens, "tokens": read}
        inputs = {"input_ids": tokens, "decoder_input_ids": read}
        # otherwise some models take their padding token for padding
        inputs["attention_mask"] = torch.ones_like(tokens)
        inputs["decoder_attention_mask"] = torch.ones_like(read)
    else:
        auto_class = "AutoModelForCausalLM"
        own = {"tokens": tokens, "positions": torch.arange(length).expand(shape)}
        inputs = {"input_ids": tokens}
    with torch.no_grad():
        return Comparison.of(
            _our_logits(config, ours, **own), _their_logits(theirs, auto_class, inputs)
        )


def _our_logits(config: RunConfig, path: Path, **inputs: Tensor) -> Tensor:
    """Return fp32 logits [samples, tokens, vocabulary], without the padding of the vocabulary."""
    with single_process_model(config, path, torch.device("cpu")) as (model, _):
        (chunk,) = model.chunks
        logits: Tensor = chunk.eval()(**inputs)
        return logits[..., : config.model.vocabulary].float()


def _their_logits(folder: Path, auto_class: str, inputs: dict[str, Tensor]) -> Tensor:
    """Return fp32 logits [samples, tokens, vocabulary] of a class of transformers."""
    try:
        import transformers
    except ImportError:
        raise DataError(
            "the comparison of the logits needs transformers\n"
            f"  do: {install_command('convert')}, or skip the comparison with --no-check"
        ) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model = getattr(transformers, auto_class).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    except Exception as error:
        raise DataError(
            f"transformers cannot load {folder}: {error}\n"
            "  do: update transformers, or convert with --no-check"
        ) from error
    logits: Tensor = model.eval()(**inputs, use_cache=False).logits
    return logits.float()
