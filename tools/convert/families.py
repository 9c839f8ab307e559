"""The families, and the choice among them."""

from pathlib import Path
from typing import Any

from frontier_llm.config import RunConfig, decode
from frontier_llm.config.model import ModelConfig
from frontier_llm.config.reading import SENTINELS
from frontier_llm.config.rules import check
from frontier_llm.errors import DataError
from frontier_llm.trainer import run_directory
from tools.compose import compose
from tools.convert.decoders import Gpt2, GptNeoX, Llama
from tools.convert.encoder_decoders import MT5, T5
from tools.convert.family import Family, Values

FAMILIES: tuple[Family, ...] = (Gpt2(), GptNeoX(), Llama(), MT5(), T5())
PIECES = 4096
"""Of a tokenizer that is trained here, where theirs is of another kind and the model has room."""
_BASES = {"gpt2": "gpt_tiny", "gpt_neox": "gpt_tiny", "llama": "llama_7b", "t5": "mt5_tiny",
          "mt5": "mt5_tiny"}  # fmt: skip
"""Whose settings a model of ours begins with; all dimensions are replaced."""


def family_for(model: ModelConfig, name: str | None) -> Family:
    """Return the family that a model of ours belongs to.

    Args:
        model: ours.
        name: of the family, if it was chosen; None = the first that fits.

    Raises:
        DataError: there is none; says what each lacks.
    """
    chosen = [family for family in FAMILIES if name in (None, family.name)]
    if not chosen:
        known = ", ".join(family.name for family in FAMILIES)
        raise DataError(f"there is no family {name}\n  do: choose one of {known}")
    lacking = {family.name: family.mismatches(model) for family in chosen}
    for family in chosen:
        if not lacking[family.name]:
            return family
    reasons = "\n".join(f"  {name}: {'; '.join(why)}" for name, why in lacking.items())
    raise DataError(f"no family has models like {model.name}:\n{reasons}")


def family_of(theirs: Values) -> Family:
    """Return the family of a model of theirs.

    Raises:
        DataError: its architecture is unknown.
    """
    for family in FAMILIES:
        if theirs.get("model_type") == family.name:
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise DataError(
        f"config.json: model_type={theirs.get('model_type')!r} is unknown here\n"
        f"  do: only models of these families can be converted: {known}"
    )


def model_overrides(
    family: Family, theirs: Values, home: Path, tokenizer: Path | None
) -> list[str]:
    """Return what the command line of a run says whose model is one of theirs.

    Args:
        family: its family.
        theirs: config.json.
        home: the run directory, as it will be called.
        tokenizer: sentencepiece model that goes with it, if there is one.

    Raises:
        DataError: config.json lacks a setting.
    """
    try:
        values = family.to_ours(theirs)
    except KeyError as error:
        raise DataError(f"config.json lacks {error.args[0]!r}") from None
    settings: dict[str, Any] = {"model.name": home.name.strip(".").partition(".")[0]}
    for key, value in {**family.wants, **values}.items():
        settings[key if "." in key else f"model.{key}"] = value
    if tokenizer is not None:
        settings["data.tokenizer"] = tokenizer
    spans = family.wants["kind"] == "t5"
    room = values["vocabulary"] - (SENTINELS if spans else 0)
    settings["data.pieces"] = max(2, min(PIECES, room))
    data = "stdlib_spans" if spans else "stdlib"
    bases = [f"model={_BASES[family.name]}", f"data={data}"]
    return bases + [f"{key}={_word(value)}" for key, value in settings.items()]


def describe_run(overrides: list[str], out: Path) -> RunConfig:
    """Write config.yaml of a run.

    Args:
        overrides: its command line.
        out: its directory, is there.

    Raises:
        ConfigError: ours has no such model.
    """
    composed = compose(["parallel.pipeline=1", "launch.ranks=1", *overrides])
    run_directory.write_config(out, run_directory.to_yaml(composed))
    config = decode(composed)
    check(config, world_size=1)
    return config


def _word(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # fields of either kind take it
    return str(value).lower() if isinstance(value, bool) else str(value)
