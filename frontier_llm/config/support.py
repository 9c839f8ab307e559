"""Which number formats, shardings, pipelines and devices can be combined: one table.

`AXES` spans all combinations; a `Refusal` names combinations that are refused, and the reason. The
validator (`check_support`), docs/collectives.md (docs/generate/collectives_page.py) and the runs of
tests/trainer/test_support.py use this table.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError

Cell = Mapping[str, str]
"""A combination: one value per axis."""
Verdict = Literal["tested", "untested", "refused"]

AXES: dict[str, tuple[str, ...]] = {
    "sharding": ("replicated", "zero1", "zero2", "zero3", "mics", "zeropp"),
    "pipeline": ("none", "1f1b", "interleaved"),
    "precision": ("fp32", "bf16", "fp16"),
    "collectives": ("plain", "zeropp", "zeropp_feedback"),
    "device": ("cpu", "cuda", "hip"),
}
TESTED_DEVICES = ("cpu",)
"""Devices on which every combination has run. Other devices differ in the kernels only."""


@dataclass(frozen=True)
class Refusal:
    """A set of combinations that are refused."""

    where: Mapping[str, tuple[str, ...]]
    """Values by trait (`traits_of`). All traits must have one of their values."""
    key: str
    why: str
    """The value that the key should have, and the reason."""
    todo: str


REFUSALS = (
    Refusal(
        {"error feedback": ("on",), "precision": ("fp16",)},
        "collectives.error_feedback",
        "false in fp16: the loss scale changes, and kept errors were multiplied by the old one",
        "set collectives=zeropp, or precision=bf16",
    ),
    Refusal(
        {"error feedback": ("on",), "gradients between nodes": ("floats",)},
        "collectives.error_feedback",
        "gradients in int8 or int4 between nodes: other formats have no error to keep",
        "set collectives.grads_across_format=int4, or collectives.error_feedback=false",
    ),
    Refusal(
        {"until_step": ("set",), "all formats": ("floats",)},
        "collectives.until_step",
        "null if no collective sends integers: there are no integer formats to end",
        "set collectives.until_step=null, or collectives=zeropp",
    ),
)
_TRAITS_OF_PRESETS: dict[str, Cell] = {
    "plain": {
        "error feedback": "off",
        "gradients between nodes": "floats",
        "all formats": "floats",
    },
    "zeropp": {
        "error feedback": "off",
        "gradients between nodes": "integers",
        "all formats": "not all floats",
    },
    "zeropp_feedback": {
        "error feedback": "on",
        "gradients between nodes": "integers",
        "all formats": "not all floats",
    },
}


def cells() -> Iterator[Cell]:
    """Yield every combination of the axes."""
    for values in product(*AXES.values()):
        yield dict(zip(AXES, values, strict=True))


def verdict(cell: Cell) -> tuple[Verdict, str]:
    """Return whether a combination runs, and the reason if it was refused or never run."""
    traits = {**cell, **_TRAITS_OF_PRESETS[cell["collectives"]], "until_step": "null"}
    for refusal in REFUSALS:
        if _matches(refusal, traits):
            return "refused", refusal.why
    if cell["device"] not in TESTED_DEVICES:
        return "untested", "no run on such a device is recorded"
    return "tested", ""


def traits_of(config: RunConfig) -> Cell:
    """Return the traits of a configuration that refusals depend on."""
    chosen = config.collectives
    across = chosen.grads_across_format or chosen.grads_format
    return {
        "precision": config.precision.name,
        "error feedback": "on" if chosen.error_feedback else "off",
        "gradients between nodes": "integers" if across.startswith("int") else "floats",
        "all formats": "not all floats" if chosen.is_quantised else "floats",
        "until_step": "null" if chosen.until_step is None else "set",
    }


def check_support(config: RunConfig) -> None:
    """Refuse combinations that do not work.

    Raises:
        ConfigError: naming the key to change.
    """
    traits = traits_of(config)
    for refusal in REFUSALS:
        if _matches(refusal, traits):
            section, _, leaf = refusal.key.partition(".")
            got = getattr(getattr(config, section), leaf)
            traits_met = ", ".join(f"{name}: {traits[name]}" for name in refusal.where)
            raise ConfigError(refusal.key, f"{got} ({traits_met})", refusal.why, refusal.todo)


def _matches(refusal: Refusal, traits: Cell) -> bool:
    return all(traits.get(name) in values for name, values in refusal.where.items())
