"""Each choice of each group takes effect in each experiment, or a rule refuses the combination.

Composing all 2,000 pairs would take minutes. Instead the files are shown to be independent: no
experiment sets a key that a file of a group sets, and all files of a group set the same keys. The
composition of a pair then is the experiment's, with the file's values in their places; some are
composed in full to confirm this. The rules run on every pair.
"""

import functools
import re

import pytest
import yaml

from frontier_llm.cli import group_files
from frontier_llm.cli.compose import OPTIONAL_GROUPS, compose, groups
from frontier_llm.cli.experiments import Header
from frontier_llm.cli.group_files import section_of
from frontier_llm.cli.machine_defaults import OF_THIS_MACHINE
from frontier_llm.cli.package_files import CONF
from frontier_llm.config import decode
from frontier_llm.config.decode import leaves
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.resolved import ResolvedLayout
from tests.covering import one_in

pytestmark = pytest.mark.slow

BASES = {
    "model": {
        "gemma2",
        "gemma3",
        "gpt",
        "llama",
        "llama3",
        "mt5",
        "qwen3",
        "t5gemma",
        "t5gemma2",
    },
    "checkpoint": {"base"},
    "cluster": set(OF_THIS_MACHINE),
}
"""Files that others extend, and those whose values follow from this machine. The former lack
values, so that they cannot be chosen alone."""
CHOICES = {
    group: [name for name in names if name not in BASES.get(group, ())]
    for group, names in groups().items()
    if group not in OPTIONAL_GROUPS
}
EXPERIMENTS = groups()["experiment"]
RULES = {
    "model": {
        "data.objective", "model.heads", "model.kv_heads", "parallel.pipeline x parallel.chunks",
    },
    "sharding": {"sharding.params", "sharding.optimizer"},
    "collectives": {"collectives.error_feedback"},
    "precision": {"precision"},
    "optimizer": {"collectives"},
    "data": {"data.objective", "data.path", "data.corpora"},
    "cluster": {"precision"},
    "checkpoint": set(),
    "engine": set(),
}  # fmt: skip
"""The keys that a refused choice of a group may name."""
file_values = functools.cache(group_files.file_values)
"""Each file is read once; the tests do not change its values."""


def _root():
    values = yaml.safe_load((CONF / "train.yaml").read_text())
    return values, values.pop("defaults")


def _pair(experiment, group, name):
    """Put the values of a file in their places."""
    return _with_choice(_composed(experiment), group, name)


def _keys(group, name):
    """Return the keys that a file of a group sets."""
    place = section_of(group)
    return {key for key, _ in leaves(file_values(group, name), f"{place}.")}


def _with_choice(values, group, name):
    """Put the values of a file into the section of its group."""
    *path, last = section_of(group).split(".")
    changed = section = dict(values)
    for key in path:
        section[key] = section = dict(section[key])
    section[last] = {**section[last], **file_values(group, name)}
    return changed


@functools.cache
def _composed(experiment):
    """Compose an experiment, once for all tests; they do not change it."""
    return compose([f"experiment={experiment}"])


_FACTORS = ("params", "grads", "optimizer")


def _refusal(config, ranks):
    """Return the error of the rule that refuses a configuration; None = it can be laid out.

    Factors that the planner would choose are replaced: whether any fit in memory is not asked here.
    """
    try:
        if config.sharding.params == "auto":
            sharding = config.sharding.model_copy(update=dict.fromkeys(_FACTORS, 1))
            config = config.model_copy(update={"sharding": sharding})
        ResolvedLayout.resolve(config, ranks, config.cluster.ranks_per_node)
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize("group", CHOICES)
def test_all_files_of_a_group_set_the_same_keys(group):
    sets = {name: set(file_values(group, name)) for name in CHOICES[group]}
    first = sets[CHOICES[group][0]]
    assert all(keys == first for keys in sets.values()), sets


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_sets_no_key_of_a_group(experiment):
    own = dict(leaves(file_values("experiment", experiment)))
    for group, names in CHOICES.items():
        keys = {key for name in names for key in _keys(group, name)}
        assert not keys & set(own), group
        assert group not in own


def test_the_root_sets_no_key_of_a_group_and_comes_first():
    root, defaults = _root()
    assert defaults[0] == "_self_"
    groups_in_order = [next(iter(default)).partition("@")[0] for default in defaults[1:]]
    assert groups_in_order[-2:] == list(OPTIONAL_GROUPS)
    assert set(groups_in_order[:-2]) == set(CHOICES)
    keys = {key for key, _ in leaves(root)}
    for group, names in CHOICES.items():
        assert not keys & _keys(group, names[0])


@pytest.mark.parametrize(
    "turn", one_in(4, range(max(len(EXPERIMENTS), *map(len, CHOICES.values()))))
)
def test_choices_take_effect_in_full_compositions(turn):
    """Choose a file of every group at once; over all turns every file and experiment is chosen."""
    experiment = EXPERIMENTS[turn % len(EXPERIMENTS)]
    chosen = {group: names[turn % len(names)] for group, names in CHOICES.items()}
    values = compose([f"experiment={experiment}", *(f"{g}={name}" for g, name in chosen.items())])
    expected = dict(_composed(experiment))
    for group, name in chosen.items():
        expected = _with_choice(expected, group, name)
    expected["run"] = {**expected["run"], "dir": values["run"]["dir"]}
    if experiment != "laptop_3d":  # the only one that sets it
        ranks = values["cluster"]["ranks_per_node"]
        expected["launch"] = {**expected["launch"], "ranks": ranks}
    assert values == expected
    assert values["run"]["dir"].startswith(f"runs/{chosen['model']}-")


@pytest.mark.parametrize("group", CHOICES)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_choice_runs_in_an_experiment_or_is_refused_by_a_rule(experiment, group):
    ranks = Header.read(CONF / "experiment" / f"{experiment}.yaml").ranks
    for name in CHOICES[group]:
        refusal = _refusal(decode(_pair(experiment, group, name)), ranks)
        if refusal is not None:
            assert refusal.key in RULES[group], f"{group}={name}: {refusal}"
            assert refusal.got
            assert refusal.wants
            assert re.search(r"set '?[a-z_.]+=", refusal.todo), str(refusal)


@pytest.mark.parametrize(
    ("overrides", "ranks", "key", "todo"),
    [
        (
            ["experiment=mt5_base", "data=text", "data.path=x"],
            8,
            "data.objective",
            "data=text_spans",
        ),
        (["experiment=mt5_base", "data=blend"], 8, "data.corpora", "data.corpora="),
        (["experiment=frontier_22b", "data=stdlib_spans"], 16, "data.objective", "data=stdlib"),
        (["experiment=mt5_xl", "model=gpt_3b"], 16, "data.objective", "data=stdlib"),
        (["experiment=zeropp_18b", "precision=bf16"], 384, "precision", "precision=fp16"),
        (["experiment=amsp_llama_7b", "cluster=dgx2_v100"], 1024, "precision", "precision=fp16"),
        (
            ["experiment=frontier_22b", "sharding=amsp_4_4_8"],
            16,
            "sharding.params",
            "set sharding.params=2",
        ),
        (
            ["experiment=frontier_22b", "collectives=zeropp_feedback"],
            16,
            "collectives.error_feedback",
            "precision=bf16",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(overrides, ranks, key, todo):
    refusal = _refusal(decode(compose(overrides)), ranks)
    assert refusal is not None
    assert refusal.key == key
    assert todo in refusal.todo
