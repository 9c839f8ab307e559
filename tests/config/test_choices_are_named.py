"""A choice that is added to the configuration alone fails; it never becomes another choice."""

import ast
import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from frontier_llm.config import RunConfig
from frontier_llm.config.data import CorpusConfig, DataConfig
from frontier_llm.config.optimizer import RateFactors
from tests.config.readers import source_of

FORMATS = {"bf16", "fp32", "int4", "int8"}

# The module that chooses by a key, with a table of the names. Then names that this module, or the
# one before the colon, handles before.
CHOOSERS = {
    "data.loss_mean": "data/batch.py",
    "data.format": "data/file_formats.py data/source_choice.py:auto data/source_choice.py:mixed",
    "model.kind": "model/build.py",
    "model.positions": "model/chunk.py",
    "model.rotary_scaling": "model/rotary.py none linear",
    "model.cross_attention": "config/model.py",
    "model.norm": "model/transformer.py",
    "model.norm_placement": "model/layer.py",
    "model.qk_norm": "model/layer.py",
    "model.activation": "model/transformer.py",
    "model.residual": "model/layer.py",
    "parallel.schedule": "geometry/pipeline_schedule.py planner/choice.py:auto",
    "parallel.waiting_weights": "planner/choice.py auto",
    "parallel.layers_per_stage": "planner/choice.py auto",
    "parallel.context": "planner/choice.py auto",
    **dict.fromkeys(
        ["sharding.params", "sharding.grads", "sharding.optimizer"], "geometry/partition.py auto"
    ),
    "collectives.formats": "geometry/wire.py",
    "collectives.scales_format": "geometry/formats.py",
    "collectives.rounding": "geometry/formats.py",
    "collectives.feedback_format": "geometry/formats.py",
    "collectives.backend": "trainer/connect.py",
    "collectives.communicators": "trainer/connect.py many",
    "cluster.device.communicators": "trainer/connect.py many",
    "precision.name": "model/transformer.py trainer/assemble.py:auto",
    "recompute": "model/layer_stack.py",
    "kernels": "device/kernels.py torch compiled elementwise",
    "attention": "model/flex.py",
    "optimizer.name": "sharding/sharded_states.py",
    "optimizer.schedule": "trainer/learning_rate.py constant inverse_sqrt",
    "optimizer.cooldown_shape": "trainer/learning_rate.py",
    "data.corpora.kind": "data/source.py",
    "data.broken": "data/corpus_build.py",
    "data.objective": "data/run_loader.py",
    "data.documents": "data/run_loader.py",
    "data.packing": "data/run_loader.py",
    "launch.trial_value": "sweeps/sweep_trials.py",
    "launch.trial_runner": "sweeps/sweep.py",
    "checkpoint.mode": "checkpoint/manager.py saving/tier_writers.py:off",
    "checkpoint.files": "saving/tier_writers.py",
    "checkpoint.when_busy": "saving/checkpoints.py",
    "checkpoint.moments": "checkpoint/reduced_moments.py saving/tier_writers.py:fp32",
    "checkpoint.on_error": "saving/checkpoints.py",
    "cluster.device.kind": "trainer/callbacks/run_checks.py",
    "plan": "cli/train.py",
    "planner.schedule": "geometry/pipeline_schedule.py",
    "planner.recompute": "planner/compute.py",
    "planner.survives": "geometry/partition.py",
    "planner.objective": "planning/search.py",
    "planner.engine.shards": "planner/space.py",
    "telemetry.wandb": "telemetry/trackers.py trainer/callbacks/records.py:off",
    "run.resume": "saving/run_directory.py",
}
OTHERWISE = {
    "data.kind": {"blend", *get_args(CorpusConfig.model_fields["kind"].annotation)},
    "data.corpora.format": set(get_args(DataConfig.model_fields["format"].annotation)),
    "optimizer.decayed": set(RateFactors.model_fields),
    "cluster.device.peak_tflops": {"fp32", "bf16", "fp16"},
}
"""Keys whose names another test or type decides."""


def choices(
    section: type[BaseModel] = RunConfig, prefix: str = ""
) -> Iterator[tuple[str, set[str]]]:
    """Yield each key that is a choice of names, and the names."""
    for name, field in section.model_fields.items():
        names = set(_names(field.annotation))
        if names:
            yield f"{prefix}{name}", names
        for nested in _sections(field.annotation):
            yield from choices(nested, f"{prefix}{name}.")


def _names(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) in (Union, types.UnionType, tuple, dict, Annotated):
        for argument in get_args(annotation)[: 1 if get_origin(annotation) is dict else None]:
            yield from _names(argument)


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections(argument)


@cache
def tables(module: str) -> list[set[str]]:
    """Return the names in each dictionary and each tuple of a module."""
    tree = ast.parse(source_of(module).read_text())
    found = []
    for node in ast.walk(tree):
        items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        found.append({item.value for item in items if isinstance(item, ast.Constant)})
    return found


CHOICES = dict(choices())


def test_every_choice_of_names_has_a_chooser():
    formats = {key for key, names in CHOICES.items() if names == FORMATS and "formats" not in key}
    of_cluster = {key for key in CHOICES if key.startswith("cluster.device.calibration.")}
    links = {key for key in CHOICES if key.startswith("cluster.links.")}
    assert set(CHOICES) - formats - of_cluster - links == {*CHOOSERS, *OTHERWISE}
    assert FORMATS in tables("geometry/formats.py")


@pytest.mark.parametrize("key", CHOOSERS)
def test_the_chooser_names_every_choice(key):
    module, *apart = CHOOSERS[key].split()
    wanted = CHOICES[key] - {name.rpartition(":")[2] for name in apart}
    assert not wanted or wanted in tables(module), (key, wanted)
    for place, _, name in (name.rpartition(":") for name in apart):
        assert f'"{name}"' in source_of(place or module).read_text(), name


@pytest.mark.parametrize("key", OTHERWISE)
def test_names_that_are_used_elsewhere_are_the_same(key):
    assert CHOICES[key] == OTHERWISE[key]


def test_a_name_without_an_implementation_is_not_another_one():
    """A GPT with an activation that only the configuration knows has no module."""
    from frontier_llm.config import decode
    from tests.values import tiny_values

    model = decode(tiny_values()).model.model_copy(update={"activation": "relu2"})
    with pytest.raises(KeyError, match="relu2"):
        _ = model.gated
