"""Verify a conversion: run both models on the same tokens and compare their logits."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from frontier_llm.config import RunConfig
from frontier_llm.errors import DataError
from frontier_llm.trainer.single_process_model import single_process_model

TOLERANCE = 1e-4
"""Largest allowed difference of two fp32 logits, relative to the largest logit (at least to 1)."""
SAMPLES, TOKENS = 2, 64
Logits = Callable[[Path], Tensor]


@dataclass(frozen=True)
class Comparison:
    """The differences between the logits of two models."""

    largest: float
    mean: float
    scale: float
    """The largest absolute logit, at least 1."""

    @classmethod
    def of(cls, ours: Tensor, theirs: Tensor) -> "Comparison":
        """Compare two tensors of fp32 logits [samples, tokens, vocabulary]."""
        differences = (ours - theirs).abs()
        scale = max(1.0, theirs.abs().max().item())
        return cls(differences.max().item(), differences.mean().item(), scale)

    @property
    def passes(self) -> bool:
        """Whether both are the same model. NaN compares as different."""
        return self.largest <= TOLERANCE * self.scale

    def __str__(self) -> str:
        return (
            f"logits differ by at most {self.largest:.2e}, {self.mean:.2e} on average; allowed "
            f"{TOLERANCE * self.scale:.2e} (largest logit {self.scale:.3g})"
        )


def compare(config: RunConfig, ours: Path, theirs: Path) -> Comparison:
    """Run both models on the CPU in fp32, on random tokens.

    Args:
        config: the configuration of our model.
        ours: our run directory or checkpoint.
        theirs: their folder.

    Raises:
        DataError: transformers is not installed, or cannot load their model.
        CheckpointError: our weights cannot be loaded.
    """
    generator = torch.Generator().manual_seed(0)
    length = min(TOKENS, config.data.sequence_length)
    shape = (SAMPLES, length)
    tokens = torch.randint(config.model.vocabulary, shape, generator=generator)
    with torch.no_grad():
        if config.model.kind == "t5":
            # The lengths differ, so that a confusion of both inputs would be found.
            answers = tokens[:, : max(1, length * 3 // 4)].flip(1)
            pairs = (
                _our_logits(config, ours, encoder_tokens=tokens, decoder_tokens=answers),
                _their_logits(theirs, "AutoModelForSeq2SeqLM", tokens, answers),
            )
        else:
            places = torch.arange(length).expand(shape)
            pairs = (
                _our_logits(config, ours, input_ids=tokens, position_ids=places),
                _their_logits(theirs, "AutoModelForCausalLM", tokens, None),
            )
    return Comparison.of(*pairs)


def _our_logits(config: RunConfig, path: Path, **inputs: Tensor) -> Tensor:
    """Return fp32 logits [samples, tokens, vocabulary], without those of padded entries."""
    masks = {"encoder_mask": None} if config.model.kind == "t5" else {"attention_mask": None}
    with single_process_model(config, path, torch.device("cpu")) as (model, _):
        (chunk,) = model.chunks
        logits: Tensor = chunk.eval()(**inputs, **masks)
        return logits[..., : config.model.vocabulary].float()


def _their_logits(folder: Path, kind: str, tokens: Tensor, answers: Tensor | None) -> Tensor:
    """Return fp32 logits [samples, tokens, vocabulary]."""
    try:
        import transformers
    except ImportError:
        raise DataError(
            "the comparison of the logits needs transformers\n"
            "  do: pip install 'frontier-llm[convert]' (in a checkout: -e '.[convert]'), "
            "or skip the comparison with --no-check"
        ) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32)
    except Exception as error:
        raise DataError(f"transformers cannot load {folder}: {error}") from error
    inputs = {"input_ids": tokens}
    if answers is not None:
        inputs["decoder_input_ids"] = answers
    logits: Tensor = model.eval()(**inputs, use_cache=False).logits
    return logits.float()
