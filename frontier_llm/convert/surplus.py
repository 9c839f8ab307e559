"""Check the tensors of a Hugging Face folder that our model does not need, by their values.

They are second copies of tied weights, and buffers, whose values follow from the settings.
"""

from collections.abc import Iterable

import torch

from frontier_llm.convert.base_family import Family
from frontier_llm.convert.theirs import TheirWeights
from frontier_llm.errors import DataError


def check_surplus(
    family: Family, weights: TheirWeights, names: Iterable[str], rotary_base: float
) -> None:
    """Refuse tensors without a place in our model that the conversion would lose.

    Raises:
        DataError: a tensor is unknown, or its values are not those of a copy or a buffer.
    """
    for name in names:
        first = next((of for suffix, of in family.copies.items() if name.endswith(suffix)), None)
        if first is not None:
            if not torch.equal(weights.read(name), weights.read(first)):
                raise DataError(
                    f"{name} differs from {first}, to which it should be tied by config.json\n"
                    "  do: set tie_word_embeddings=false in config.json if the model is not tied"
                )
        elif not name.endswith(tuple(family.unused)):
            raise DataError(
                f"{name} has no place in our model, so the conversion would lose it\n  do: if our "
                "model computes with it, add a row to its family in frontier_llm/convert"
            )
        elif not _is_usual(name, weights.read_any(name), rotary_base):
            raise DataError(f"the buffer {name} has other values than this project computes with")


def _is_usual(name: str, buffer: torch.Tensor, rotary_base: float) -> bool:
    """Return whether a buffer is a causal mask, its fill value, or inverse wavelengths."""
    size, kind = buffer.shape[-1] if buffer.dim() else 1, name.rpartition(".")[2]
    if kind == "masked_bias":
        return buffer.numel() == 1 and float(buffer) <= -1e4
    if kind == "bias":
        is_square = buffer.numel() == size * size
        return is_square and torch.equal(
            buffer.float().view(size, size), torch.ones(size, size).tril()
        )
    usual = rotary_base ** -(torch.arange(size) / size)
    # the values may have been rounded to 16 bits
    return buffer.dim() == 1 and torch.allclose(buffer.float(), usual, rtol=1e-2)
