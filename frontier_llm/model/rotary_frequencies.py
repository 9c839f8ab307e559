"""Stretch the wavelengths of rotary positions, for samples longer than those of earlier training.

A dimension pair turns by its frequency per token. Pairs that make many turns within a sample of the
earlier training keep their frequency, and pairs that make few turns are slowed down by a factor, so
that longer samples contain no angles that the model has not seen. Between the two, the frequencies
are interpolated:

- `llama3` interpolates linearly in the number of turns (Llama 3.1, in the code of the released
  model; Llama 3, arXiv:2407.21783, gives the base only).
- `yarn` interpolates linearly in the number of the pair, between the pairs with these numbers of
  turns, as the authors' code does. (The paper writes a ramp in the number of turns: YaRN,
  arXiv:2309.00071, section 3.2.) It also multiplies queries and keys by an attention factor
  (section 3.4).
"""

import math

import torch
from torch import Tensor

from frontier_llm.config.model import ModelConfig


def stretched(frequencies: Tensor, model: ModelConfig) -> Tensor:
    """Return the frequencies of a model with `rotary_scaling`.

    They are [r / 2] fp32, in radians per token of each pair of the r rotated dimensions, in falling
    order.
    """
    length = model.rotary_original_length
    if model.rotary_scaling == "none" or length is None:
        return frequencies
    kept = {"llama3": _llama3_share, "yarn": _yarn_share}[model.rotary_scaling]
    share = kept(frequencies, model, length)
    return frequencies * share + frequencies / model.rotary_factor * (1 - share)


def attention_factor(model: ModelConfig) -> float:
    """Return the factor of rotated queries and of rotated keys (YaRN, equation 22)."""
    if model.rotary_scaling != "yarn":
        return 1.0
    if model.rotary_attention_factor is not None:
        return model.rotary_attention_factor
    return 0.1 * math.log(model.rotary_factor) + 1.0


def _llama3_share(frequencies: Tensor, model: ModelConfig, length: int) -> Tensor:
    """Return the share of the original frequency in each stretched one: [r / 2], 0 to 1."""
    turns = length * frequencies / (2 * math.pi)
    slow, fast = model.rotary_slow_turns, model.rotary_fast_turns
    return ((turns - slow) / (fast - slow)).clamp(0, 1)


def _yarn_share(frequencies: Tensor, model: ModelConfig, length: int) -> Tensor:
    """Return the share of the original frequency in each stretched one: [r / 2], 0 to 1."""
    width = model.rotated_width

    def pair_with(turns: float) -> float:
        """Return the number of the pair that makes this many turns, in general a fraction."""
        wavelength = length / (2 * math.pi * turns)
        return width * math.log(wavelength) / (2 * math.log(model.rotary_base))

    first = max(math.floor(pair_with(model.rotary_fast_turns)), 0)
    last = min(math.ceil(pair_with(model.rotary_slow_turns)), width - 1)
    pairs = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    # the authors' code avoids the division by zero in this way
    ramp = (pairs - first) / (last - first if last != first else 0.001)
    return 1 - ramp.clamp(0, 1)
