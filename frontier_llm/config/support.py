"""The table of number formats, shardings, pipelines and devices that can be combined.

`AXES` gives all combinations. A `Refusal` describes combinations that are refused, and the reason.
Three places use this table: `check_support`, which checks a configuration; the page
docs/collectives.md, which shows the table (docs/generate/collectives_page.py); and
tests/trainer/test_support.py, which runs the combinations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from frontier_llm.config.collectives import CollectivesConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError, refuse

Cell = Mapping[str, str]
"""A combination: one value per axis, by the name of the axis."""
Verdict = Literal["tested", "untested", "refused"]

AXES: dict[str, tuple[str, ...]] = {
    "sharding": ("replicated", "zero1", "zero2", "zero3", "mics", "zeropp", "levels"),
    "pipeline": ("none", "1f1b", "interleaved"),
    "precision": ("fp32", "bf16", "fp16"),
    "collectives": (
        "plain", "bf16", "qwz", "qgz", "zeropp", "zeropp_feedback", "four_bits", "levels",
    ),
    "device": ("cpu", "cuda", "hip"),
}  # fmt: skip
TESTED_DEVICES = ("cpu",)
"""Devices on which every combination has run. On other devices only the kernels differ."""


@dataclass(frozen=True)
class Refusal:
    """A set of combinations that are refused."""

    where: Mapping[str, tuple[str, ...]]
    """Values by name of a trait (`traits_of`). A combination is refused if each of these traits has
    one of its values."""
    key: str
    why: str
    """The legal values of the key, and the reason."""
    todo: str
    """The change that the error message suggests."""


REFUSALS = (
    Refusal(
        {"error feedback": ("on",), "precision": ("fp16",)},
        "collectives.error_feedback",
        "false in fp16, because kept errors contain the loss scale, which changes between steps",
        "set collectives=zeropp, or precision=bf16",
    ),
    Refusal(
        {"error feedback": ("on",), "gradients between nodes": ("floats",)},
        "collectives.error_feedback",
        "gradients in int8 or int4 between nodes, because other formats have no error to keep",
        "set collectives.grads_across_format=int4, or collectives.error_feedback=false",
    ),
)
# the traits of the choices of `collectives` that are an axis of the table
_FLOATS = {"error feedback": "off", "gradients between nodes": "floats"}
_INTEGERS = {"error feedback": "off", "gradients between nodes": "integers"}
_TRAITS_OF_PRESETS: dict[str, Cell] = {
    "plain": _FLOATS,
    "bf16": _FLOATS,
    "qwz": _FLOATS,
    "qgz": _INTEGERS,
    "zeropp": _INTEGERS,
    "zeropp_feedback": {**_INTEGERS, "error feedback": "on"},
    "four_bits": {**_INTEGERS, "error feedback": "on"},
    "levels": {**_INTEGERS, "error feedback": "on"},
}


def verdict(cell: Cell) -> tuple[Verdict, str]:
    """Return whether a combination is tested, untested or refused, and the reason unless tested."""
    traits = {**cell, **_TRAITS_OF_PRESETS[cell["collectives"]]}
    for refusal in REFUSALS:
        if _matches(refusal, traits):
            return "refused", refusal.why
    if cell["device"] not in TESTED_DEVICES:
        return "untested", "no run on such a device is recorded"
    return "tested", ""


def traits_of(config: RunConfig) -> Cell:
    """Return the properties of a configuration on which refusals depend, by name."""
    collectives = config.collectives
    between_nodes = (collectives.grads_formats[-1], collectives.sums_formats[-1])
    are_integers = any(name.startswith("int") for name in between_nodes)
    return {
        "precision": config.precision.name,
        "error feedback": "on" if collectives.error_feedback else "off",
        "gradients between nodes": "integers" if are_integers else "floats",
    }


def check_support(config: RunConfig) -> None:
    """Refuse a configuration that combines settings that do not work together."""
    _check_messages(config.collectives)
    traits = traits_of(config)
    for refusal in REFUSALS:
        if _matches(refusal, traits):
            section, _, leaf = refusal.key.partition(".")
            got = getattr(getattr(config, section), leaf)
            traits_met = ", ".join(f"{name}: {traits[name]}" for name in refusal.where)
            raise ConfigError(refusal.key, f"{got} ({traits_met})", refusal.why, refusal.todo)


def _check_messages(collectives: CollectivesConfig) -> None:
    """Refuse message formats that the kernels cannot write."""
    run, block = collectives.rotation_elements, collectives.block_elements
    refuse(
        (run and (run < 16 or run & (run - 1) or (block != run and block % (2 * run))),
         "collectives.rotation_elements", f"{run}, with collectives.block_elements={block}",
         "0, or a power of two from 16 that is block_elements or divides half of it",
         "set collectives.rotation_elements=16"),
        (collectives.refresh_differences and not collectives.refresh_format.startswith("int"),
         "collectives.refresh_format",
         f"{collectives.refresh_format}, with collectives.refresh_differences=true",
         "int8 or int4, because differences are sent as integers",
         "set collectives.refresh_format=int4, or collectives.refresh_differences=false"),
    )  # fmt: skip


def _matches(refusal: Refusal, traits: Cell) -> bool:
    return all(traits.get(name) in values for name, values in refusal.where.items())
