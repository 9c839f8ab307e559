"""What can be combined with what on the wire: one table for the validator, the page and the tests.

`AXES` spans all combinations; a `Refusal` names those that are refused, and why. The validator
(`check_support`), docs/collectives.md (tools/collectives_page.py) and the runs of
tests/trainer/test_support.py are made from it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError

Cell = Mapping[str, str]
"""A value of each axis."""
Verdict = Literal["tested", "untested", "refused"]

AXES: dict[str, tuple[str, ...]] = {
    "sharding": ("replicated", "zero1", "zero2", "zero3", "mics", "zeropp"),
    "pipeline": ("none", "1f1b", "interleaved"),
    "precision": ("fp32", "bf16", "fp16"),
    "collectives": ("plain", "zeropp", "zeropp_feedback"),
    "device": ("cpu", "cuda", "hip"),
}
TESTED_DEVICES = ("cpu",)
"""Where every combination has run. The code for the others is the same but for the kernels."""


@dataclass(frozen=True)
class Refusal:
    """Combinations that are refused."""

    where: Mapping[str, tuple[str, ...]]
    """Values of traits (`traits_of`), of which one each must be met."""
    key: str
    why: str
    """What the key wants, and why."""
    todo: str


REFUSALS = (
    Refusal(
        {"feedback": ("yes",), "precision": ("fp16",)},
        "collectives.error_feedback",
        "false in fp16: kept errors are in units of a loss scale that changes",
        "set collectives=zeropp, or precision=bf16",
    ),
    Refusal(
        {"feedback": ("yes",), "across": ("float",)},
        "collectives.error_feedback",
        "gradients in int8 or int4 between nodes: there is nothing to keep of others",
        "set collectives.grads_across_format=int4, or collectives.error_feedback=false",
    ),
    Refusal(
        {"until": ("some step",), "formats": ("float",)},
        "collectives.until_step",
        "null where nothing travels as integers: there is nothing to end",
        "set collectives.until_step=null, or collectives=zeropp",
    ),
)
_TRAITS_OF_PRESETS: dict[str, Cell] = {
    "plain": {"feedback": "no", "across": "float", "formats": "float"},
    "zeropp": {"feedback": "no", "across": "integers", "formats": "integers"},
    "zeropp_feedback": {"feedback": "yes", "across": "integers", "formats": "integers"},
}


def cells() -> Iterator[Cell]:
    """Yield every combination of the axes."""
    for values in product(*AXES.values()):
        yield dict(zip(AXES, values, strict=True))


def verdict(cell: Cell) -> tuple[Verdict, str]:
    """Say whether a combination runs, and why not."""
    traits = {**cell, **_TRAITS_OF_PRESETS[cell["collectives"]], "until": "never"}
    for refusal in REFUSALS:
        if _matches(refusal, traits):
            return "refused", refusal.why
    if cell["device"] not in TESTED_DEVICES:
        return "untested", "no run on such a device is recorded"
    return "tested", ""


def traits_of(config: RunConfig) -> Cell:
    """Describe a configuration by what refusals speak of."""
    chosen = config.collectives
    across = chosen.grads_across_format or chosen.grads_format
    return {
        "precision": config.precision.name,
        "feedback": "yes" if chosen.error_feedback else "no",
        "across": "integers" if across.startswith("int") else "float",
        "formats": "integers" if chosen.is_quantised else "float",
        "until": "never" if chosen.until_step is None else "some step",
    }


def check_support(config: RunConfig) -> None:
    """Refuse what cannot be combined.

    Raises:
        ConfigError: naming the key to change.
    """
    traits = traits_of(config)
    for refusal in REFUSALS:
        if _matches(refusal, traits):
            section, _, leaf = refusal.key.partition(".")
            got = getattr(getattr(config, section), leaf)
            beside = ", ".join(f"{name}: {traits[name]}" for name in refusal.where)
            raise ConfigError(refusal.key, f"{got} ({beside})", refusal.why, refusal.todo)


def _matches(refusal: Refusal, traits: Cell) -> bool:
    return all(traits.get(name) in values for name, values in refusal.where.items())
