"""Every key changes something in each choice of its group, or is refused there."""

import ast
import json
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from functools import cache, reduce
from typing import Annotated, Any, get_args

import pytest
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from frontier_llm.config import RunConfig, decode
from frontier_llm.config.decode import keys
from frontier_llm.config.needed import unused
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.inventory import model_shapes
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import budget_bytes, estimate
from frontier_llm.trainer.learning_rate import LearningRate
from tests.config.readers import READERS, source_of
from tests.covering import exhaustive
from tests.values import tiny_values

RANKS, PER_NODE = 16, 4
LAYOUT = ("parallel.tensor=2", "parallel.pipeline=2", "data.global_batch=32", "data.micro_batch=2")
ROTARY = ("model.positions=rotary", "model.heads=2")
T5 = ("model=mt5_tiny", "data=stdlib_spans", "data.vocabulary=20")

# choices of the groups, with what makes them run on these ranks
CHOICES: dict[str, list[tuple[str, ...]]] = {
    "model": [
        (),
        ROTARY,
        (*ROTARY, "model.rotary_scaling=llama3", "model.rotary_original_length=8"),
        (*ROTARY, "model.rotary_scaling=yarn", "model.rotary_original_length=8"),
        ("model.window=4",),
        ("model.tied=false", "model.activation=swiglu", "model.norm=rmsnorm"),
        T5,
    ],
    "parallel": [(), ("parallel.pipeline=1",), ("parallel.tensor=1",), ("parallel.chunks=2",)],
    "sharding": [
        (f"sharding={name}",)
        for name in ("replicated", "zero1", "zero2", "zero3", "mics", "zeropp")
    ],
    "collectives": [
        (f"collectives={name}", f"sharding={sharding}", *more)
        for name in ("plain", "qwz", "qgz", "zeropp", "four_bits")
        for sharding in ("replicated", "zero1", "zero3", "mics", "zeropp")
        for more in ((), ("cluster=a100_80g",))
    ],
    "precision": [(f"precision={name}",) for name in ("auto", "bf16", "fp16", "fp32")],
    "optimizer": [
        *((f"optimizer={name}",) for name in ("adafactor", "adamw", "adamw_8bit", "muon")),
        *((f"optimizer.schedule={name}",) for name in ("linear", "constant", "wsd")),
    ],
    "data": [
        (),
        ("data=text", "data.path=/x"),
        ("data.tokenizer=/x",),
        ("data=blend", "data.corpora=[{name: a, path: /x}]"),
        T5,
    ],
    "checkpoint": [
        *((f"checkpoint={name}",) for name in ("off", "blocking", "lazy")),
        ("checkpoint=lazy", "checkpoint.tiers.local.path=/x"),
    ],
    "recovery": [(), ("recovery.enabled=true",), ("recovery.partner_copies=true",)],
    "watchdog": [(), ("watchdog.enabled=false",), ("watchdog.stragglers_every_steps=null",)],
    "launch": [(), ("launch.trial_runner=plan",), ("recovery.enabled=true",)],
    "trainer": [(), ("trainer.spike_factor=3",), ("trainer.sample_tokens=0",)],
    "telemetry": [(), ('telemetry.wandb="off"',), ("telemetry.trace_from_step=2",)],
    "planner": [(), ("planner.objective=nodes",)],
    "": [(), ("model.window=4",), ("cluster=a100_80g",)],
    "cluster": [(), ("cluster=a100_80g",)],
    "run": [()],
}
COVERED = {
    choice
    for choice in CHOICES["collectives"]
    if choice[0] in ("collectives=qwz", "collectives=qgz")
    or choice[1] in ("sharding=zero1", "sharding=mics")
}
"""Choices whose formats others have, too, or whose states are cut as in others."""
SOURCES = {key: "a source of figures" for key, _, _ in keys() if key.endswith(".source")}
EXAMPLES = (
    *(0, 1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 0.1, 0.25, 0.5, 1.5, 8.0, 100.0, True, False, None),
    *("text", "cpu", "cuda", ["text"], [2], {"network": "int8"}, {"fp32": 3.0}, {"A": "b"}),
    [{"rate": 0.5}],
    [{"rate": 0.5}],
)


def field_of(key: str) -> FieldInfo:
    """Return the field of a dotted key."""
    *sections, leaf = key.split(".")

    def enter(section: type[BaseModel], name: str) -> type[BaseModel]:
        nested = section.model_fields[name].annotation
        assert isinstance(nested, type)
        return nested

    return reduce(enter, sections, RunConfig).model_fields[leaf]


def others(key: str, now: Any) -> Iterator[Any]:
    """Yield other values that the type of a key accepts."""
    field = field_of(key)
    type_: Any = Annotated[(field.annotation, key, *field.metadata)]
    adapter = TypeAdapter(type_, config=ConfigDict(strict=True))
    words = [word for type_ in (field.annotation, *get_args(field.annotation))
             for word in (type_, *get_args(type_)) if type(word) is str]  # fmt: skip
    near = [now * 2, now + 1] if type(now) in (int, float) else []
    for value in (*near, *words, *([word] for word in words), *EXAMPLES):
        with suppress(ValidationError):
            adapter.validate_json(json.dumps(value))
            if value != now:
                yield value


def derived(config: RunConfig) -> str:
    """Return what follows from a configuration: shapes, memory, times, messages and rates."""
    precision = "fp32" if config.precision.name == "auto" else config.precision.name
    config = config.model_copy(
        update={"precision": config.precision.model_copy(update={"name": precision})}
    )
    candidate = Candidate.of(config, RANKS, PER_NODE)
    found, layout = estimate(candidate), candidate.layout
    rates = LearningRate.of(config)
    return repr(
        (
            found.memory, found.time, found.hardware_tflops, budget_bytes(candidate),
            [rates(step) for step in (*range(1, 200), 10**9)],
            model_shapes(config.model, config.data.sequence_length), layout.factors,
            layout.communicators, config.decay_steps,
        )
    )  # fmt: skip


@cache
def base(choice: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    """Return the values of a choice and what follows from them."""
    values = tiny_values(*LAYOUT, *choice)
    return values, derived(decode(values))


def read_by() -> dict[str, str]:
    """Return the module that reads a key while a run or a command works, by key."""
    return {key: module for module, names in READERS.items() for key in names.split()} | SOURCES


ROWS = [
    (key, choice)
    for key, _, _ in keys()
    for choice in CHOICES[key.partition(".")[0] if "." in key else ""]
]


def effect(key: str, choice: tuple[str, ...]) -> str:
    """Return what happens if a key gets another value in a choice of its group."""
    original, before = base(choice)
    values = deepcopy(original)
    *path, leaf = key.split(".")
    section = reduce(dict.__getitem__, path, values)
    verdict = "untried"
    for value in others(key, section.get(leaf)):
        section[leaf] = value
        verdict = "refused" if verdict == "untried" else verdict
        with suppress(ConfigError):
            config = decode(values)
            if key in dict(unused(config)):
                return "refused"
            if derived(config) != before:
                return "changes"
            verdict = "nothing"
    return verdict


@pytest.mark.parametrize(
    ("section", "is_covered"),
    [*((section, False) for section in CHOICES), *exhaustive(("collectives", True))],
)
def test_a_key_changes_something_or_is_refused(section, is_covered):
    silent = {
        (key, choice, found)
        for key, choice in ROWS
        if (key.partition(".")[0] if "." in key else "") == section and key not in read_by()
        if (choice in COVERED) == is_covered
        for found in [effect(key, choice)]
        if found not in ("changes", "refused")
    }
    assert not silent


@pytest.mark.parametrize("module", READERS)
def test_the_listed_module_reads_the_key(module):
    tree = ast.parse(source_of(module).read_text())
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    read |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    names = {
        key: key.split(".")[-2 if "rate_factors" in key else -1] for key in READERS[module].split()
    }
    assert not [key for key, name in names.items() if name not in read]
    assert not set(READERS[module].split()) - {key for key, _, _ in keys()}
