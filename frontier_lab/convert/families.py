"""List the families of models that can be converted, and choose the family of a model.

Tensors that our model does not need are checked by their values: they are second copies of tied
weights, and buffers, whose values follow from the settings.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from frontier_lab.convert.base_family import Family, Values
from frontier_lab.convert.decoders import Gpt2, GptNeoX, Llama, Mistral, Olmo2, Qwen2, Qwen3
from frontier_lab.convert.encoder_decoders import MT5, T5
from frontier_lab.convert.gemma import Gemma2, Gemma3
from frontier_lab.convert.t5gemma import T5Gemma
from frontier_lab.convert.t5gemma2 import T5Gemma2
from frontier_lab.convert.theirs import TheirWeights
from frontier_llm.cli.package_files import conf_file
from frontier_llm.config.denoisers import SENTINELS
from frontier_llm.config.model import ModelConfig
from frontier_llm.errors import DataError

FAMILIES: tuple[Family, ...] = (
    Gpt2(),
    GptNeoX(),
    Llama(),
    Mistral(),
    Qwen2(),
    Qwen3(),
    Olmo2(),
    Gemma2(),
    Gemma3(),
    T5Gemma(),
    T5Gemma2(),
    MT5(),
    T5(),
)
_SIZES = (
    "layers", "vocabulary", "hidden", "heads", "kv_heads", "head_dim", "ffn",
    "relative_buckets",
)  # fmt: skip
"""Our settings, also those of an encoder, that the number of their tensors or their largest dim
limits."""
NEW_VOCABULARY = 4096
"""Number of tokens of the tokenizer that a run trains if their tokenizer cannot be converted."""
_BASES = {
    "gpt2": "gpt_tiny", "gpt_neox": "gpt_tiny", "t5": "mt5_tiny", "mt5": "mt5_tiny",
    "t5gemma": "t5gemma_2b_2b", "t5gemma2": "t5gemma2_tiny",
}  # fmt: skip
"""The file of conf/model/ from which the configuration of a converted model is composed, unless it
is llama_7b. All its dimensions are overridden."""
_CLOSEST = 3  # families that are named if none fits
_RESTORE = "restore config.json from where the model is from"


def family_for(model: ModelConfig, name: str | None) -> Family:
    """Return the family that our model belongs to: the first that fits, if it has no name."""
    chosen = [family for family in FAMILIES if name in (None, family.name)]
    if not chosen:
        known = ", ".join(family.name for family in FAMILIES)
        raise DataError(f"there is no family {name}\n  do: choose one of {known}")
    mismatches = {family.name: family.mismatches(model) for family in chosen}
    for family in chosen:
        if not mismatches[family.name]:
            return family
    if name is not None:
        fitting = [family.name for family in FAMILIES if not family.mismatches(model)]
        todo = f"write --family {' or '.join(fitting)}" if fitting else "leave out --family"
        reasons = "; ".join(mismatches[name])
        raise DataError(f"{model.name} is no model of the family {name}: {reasons}\n  do: {todo}")
    closest = sorted(mismatches.items(), key=lambda item: len(item[1]))[:_CLOSEST]
    lines = "\n".join(f"  {name}: {'; '.join(reasons)}" for name, reasons in closest)
    raise DataError(
        f"no family has models like {model.name}. The closest ones, with what differs:\n{lines}\n"
        "  do: train a model with the settings of one of these families; generate, evaluate and "
        "train read this one as it is"
    )


def family_of(theirs: Values) -> Family:
    """Return the family of their model."""
    for family in FAMILIES:
        if theirs.get("model_type") == family.name:
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise DataError(
        f"config.json: model_type={theirs.get('model_type')!r} is unknown here\n"
        f"  do: only models of these families can be converted: {known}"
    )


def model_settings(theirs: Values) -> tuple[str, dict[str, Any]]:
    """Return the file of conf/model that a model is composed from, and our settings by key.

    Raises:
        DataError: their config.json lacks a setting, or our model has none like it.
    """
    family = family_of(theirs)
    try:
        family.refuse_variants(theirs)
        values = {**family.wants, **family.to_ours(theirs)}
    except KeyError as error:
        raise DataError(f"config.json lacks {error.args[0]!r}\n  do: {_RESTORE}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise DataError(f"config.json has an unusable setting: {error}\n  do: {_RESTORE}") from None
    settings = {key if "." in key else f"model.{key}": value for key, value in values.items()}
    return _BASES.get(family.name, "llama_7b"), settings


def model_overrides(
    family: Family, theirs: Values, home: Path, tokenizer: Path | None, weights: TheirWeights
) -> list[str]:
    """Return the command-line overrides, such as `model.hidden=768`, of a run of their model.

    The run directory `home` gives the model its name. Their tensors limit the sizes.
    """
    base, settings = model_settings(theirs)
    for key, value in settings.items():
        limit = len(weights.names) if "layers" in key else weights.largest_dim
        size = key.removeprefix("model.").removeprefix("encoder_")
        if size in _SIZES and value is not None and value > limit:
            raise DataError(
                f"config.json has an unusable setting: {key}={value}, but the tensors are for at "
                f"most {limit}\n  do: {_RESTORE}"
            )
    name = home.name.strip(".").partition(".")[0]
    if conf_file("model", name).exists():  # a name that stands for all values of that file
        name = f"{name}_imported"
    settings = {"model.name": name, **settings}
    if tokenizer is not None:
        settings["data.tokenizer"] = tokenizer
    spans = family.wants["kind"] == "t5"
    if tokenizer is None:
        # the sentinels of span corruption need ids after the tokenizer's vocabulary
        available_ids = settings["model.vocabulary"] - (SENTINELS if spans else 0)
        if available_ids < 2:
            raise DataError(
                f"config.json: vocab_size={settings['model.vocabulary']} is too small: ids are "
                f"needed for {SENTINELS} sentinels, which mark removed spans, and for a text\n"
                f"  do: convert a model of {SENTINELS + 2} or more tokens"
            )
        settings["data.vocabulary"] = min(NEW_VOCABULARY, available_ids)
    data = "stdlib_spans" if spans else "stdlib"
    bases = [f"model={base}", f"data={data}"]
    return bases + [f"{key}={_override_value(value)}" for key, value in settings.items()]


def _override_value(value: Any) -> str:
    """Write a value as it is written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # fields of type int and of type float both accept an integer
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_surplus(
    family: Family, weights: TheirWeights, names: Iterable[str], rotary_base: float
) -> None:
    """Refuse tensors without a place in our model that the conversion would lose."""
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
                "model computes with it, add a row to its family in frontier_lab/convert"
            )
        elif not _is_usual(name, weights.read_any(name), rotary_base):
            raise DataError(
                f"the buffer {name} has other values than this project computes with, so our model "
                "would compute something else\n  do: convert a model without such a change"
            )


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
