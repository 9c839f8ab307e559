"""A mistake in a file of the user is explained with the file, the line and what to write instead.

A group's choice that is written as a value is refused: otherwise a run would train with the values
of one file under the name of another one.
"""

from pathlib import Path

import pytest

from frontier_llm.cli.compose import compose, groups
from frontier_llm.cli.group_files import section_of
from frontier_llm.cli.package_files import CONF_DIR_VARIABLE
from frontier_llm.config.decode import decode
from frontier_llm.errors import ConfigError

HEAD = "# @package _global_\n"
LABELLED = {"model": "gpt_125m", "data": "text", "sharding": "zero1", "collectives": "zeropp",
            "cluster": "a100_80g", "engine": "fsdp"}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CONF_DIR_VARIABLE, str(tmp_path))
    (tmp_path / "experiment").mkdir()
    (tmp_path / "model").mkdir()
    return tmp_path


def refused(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    return caught.value


def of_experiment(folder: Path, text: str | bytes) -> ConfigError:
    content = text if isinstance(text, bytes) else (HEAD + text).encode()
    (folder / "experiment" / "mine.yaml").write_bytes(content)
    return refused("experiment=mine")


@pytest.mark.parametrize("group", LABELLED)
def test_the_name_of_another_choice_is_refused_everywhere(folder: Path, group: str) -> None:
    section, name = section_of(group), LABELLED[group]
    keys = f"{section}: {name}\n", f"{section}: {{name: {name}}}\n"
    if section == "planner.engine":
        keys = f"planner: {{engine: {name}}}\n", f"planner: {{engine: {{name: {name}}}}}\n"
    word = f"/{group}@{section}" if section != group else f"/{group}"
    for text, key in zip(keys, (section, f"{section}.name"), strict=True):
        error = of_experiment(folder, text)
        assert error.key == key
        assert f"`- override {word}: {name}`" in error.todo
    error = refused(f"{section}.name={name}")
    assert error.key == f"{section}.name"
    assert error.todo == f"write {section}={name} on the command line"


@pytest.mark.parametrize("group", LABELLED)
def test_what_the_advice_says_is_accepted(folder: Path, group: str) -> None:
    section, name = section_of(group), LABELLED[group]
    word = f"{group}@{section}" if section != group else group
    text = f"{HEAD}defaults:\n  - override /{word}: {name}\n"
    (folder / "experiment" / "mine.yaml").write_text(text)
    for overrides in (["experiment=mine"], [f"{section}={name}"]):
        found = compose(overrides)
        for part in section.split("."):
            found = found[part]
        assert found["name"] == name


def test_every_group_with_names_is_tried() -> None:
    named = {group for group in groups() if group not in ("checkpoint", "experiment", "sweep")}
    assert named == {*LABELLED, "precision", "optimizer"}


@pytest.mark.parametrize("group", ["precision", "optimizer"])
def test_a_choice_that_decides_by_its_name_is_no_string(folder: Path, group: str) -> None:
    name = groups()[group][-1]
    error = of_experiment(folder, f"{group}: {name}\n")
    assert error.key == group
    assert f"`- override /{group}: {name}`" in error.todo


def test_names_of_ones_own_and_inherited_names_are_no_mistakes(folder: Path) -> None:
    (folder / "model" / "mine.yaml").write_text("defaults: [gpt_125m]\nlayers: 3\n")
    (folder / "model" / "other.yaml").write_text("defaults: [gpt_125m]\nname: renamed\n")
    assert compose(["model=mine"])["model"]["name"] == "gpt_125m"
    assert compose(["model=other"])["model"]["name"] == "renamed"
    assert compose(["model.name=a_test"])["model"]["name"] == "a_test"


def test_an_experiment_within_an_experiment_is_explained(folder: Path) -> None:
    error = of_experiment(folder, "experiment: frontier_22b\n")
    assert "`- frontier_22b` under `defaults:`" in error.todo


@pytest.mark.parametrize(
    ("text", "line", "problem", "todo"),
    [
        ("trainer: {steps: 9\n", 3, "expected ','", "end of the line before"),
        ("trainer:\n\tsteps: 9\n", 3, r"'\t'", "spaces"),
        ("trainer: {steps: 9}\ntrainer: {seed: 1}\n", 3, "duplicate key trainer", "once"),
        ("run: {dir: 'x}\n", 3, "end of stream", "end of the line before"),
        ("a: b: c\n", 2, "mapping values are not allowed", "correct the line"),
    ],
)
def test_yaml_that_cannot_be_read_is_named_with_its_line(
    folder: Path, text: str, line: int, problem: str, todo: str
) -> None:
    error = of_experiment(folder, text)
    assert error.key == f"{folder}/experiment/mine.yaml, line {line}"
    assert problem in str(error.got)
    assert todo in error.todo


def test_a_broken_file_that_an_experiment_chooses_is_named(folder: Path) -> None:
    (folder / "model" / "mine.yaml").write_text("name: mine\n  layers: 3\n")
    assert refused("model=mine").key == f"{folder}/model/mine.yaml, line 2"
    error = of_experiment(folder, "defaults:\n  - override /model: mine\n")
    assert error.key == f"{folder}/model/mine.yaml, line 2"


def test_a_file_in_another_encoding_is_named(folder: Path) -> None:
    error = of_experiment(folder, HEAD.encode() + "run: {dir: Übung}\n".encode("latin-1"))
    assert error.key == f"{folder}/experiment/mine.yaml"
    assert "UTF-8" in error.todo


def test_a_file_without_keys_is_refused(folder: Path) -> None:
    error = of_experiment(folder, "- trainer\n")
    assert (error.key, error.got) == (f"{folder}/experiment/mine.yaml", "a list")


@pytest.mark.parametrize(
    "entry",
    ["/model: gpt_125m", "model: gpt_125m", "override model: gpt_125m",
     "override /planner.engine: fsdp", "override /engine: fsdp"],
)  # fmt: skip
def test_a_choice_that_hydra_cannot_use_gets_its_right_form(folder: Path, entry: str) -> None:
    error = of_experiment(folder, f"defaults:\n  - {entry}\n")
    assert error.key == "defaults of experiment=mine"
    right = "/engine@planner.engine: fsdp" if "fsdp" in entry else "/model: gpt_125m"
    assert error.todo == f"write `- override {right}`"


def test_files_that_do_not_exist_are_named(folder: Path) -> None:
    error = of_experiment(folder, "defaults:\n  - override /model: gpt_125n\n")
    assert error.todo == "write `- override /model: gpt_125m`"
    for text in ("defaults: [frontier_23b]\n", "defaults: {model: gpt_125m}\n"):
        assert "does not exist" in of_experiment(folder, text).wants


def test_a_dotted_key_in_a_file_gets_its_nested_form(folder: Path) -> None:
    (folder / "experiment" / "mine.yaml").write_text(f"{HEAD}trainer.steps: 4\n")
    with pytest.raises(ConfigError) as caught:
        decode(compose(["experiment=mine"]))
    assert caught.value.key == "trainer.steps"
    assert caught.value.todo == "in a file, write `trainer: {steps: 4}`"


def test_dashes_before_a_key_are_refused() -> None:
    assert refused("--trainer.steps=20").todo == "write trainer.steps=20"
