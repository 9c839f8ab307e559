"""A file's own values are read through the files that it extends; conflicts are refused."""

import pytest

from frontier_llm.cli.compose import compose
from frontier_llm.cli.group_files import file_values
from frontier_llm.cli.package_files import CONF_DIR_VARIABLE
from frontier_llm.config.decode import leaves
from frontier_llm.errors import ConfigError


@pytest.fixture
def own_files(tmp_path, monkeypatch):
    """Write an experiment that sets a key of the optimizer's files, and one that extends it."""
    monkeypatch.setenv(CONF_DIR_VARIABLE, str(tmp_path))
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\noptimizer: {learning_rate: 5.0e-4}\ntrainer: {steps: 7}\n"
    )
    (tmp_path / "experiment" / "longer.yaml").write_text(
        "# @package _global_\ndefaults: [mine]\ntrainer: {steps: 9}\n"
    )


def test_a_file_is_read_with_the_files_it_extends():
    values = file_values("model", "llama_7b")
    assert (values["layers"], values["norm"], values["dropout"]) == (32, "rmsnorm", 0.0)
    assert "defaults" not in values
    assert dict(leaves({"a": {"b": 1, "c": {}}, "d": 2})) == {"a.b": 1, "a.c": {}, "d": 2}


@pytest.mark.usefixtures("own_files")
@pytest.mark.parametrize("experiment", ["mine", "longer"])
def test_a_choice_that_an_experiment_would_override_is_refused(experiment):
    with pytest.raises(ConfigError) as caught:
        compose([f"experiment={experiment}", "optimizer=adamw_tiny"])
    error = caught.value
    assert error.key == "optimizer"
    assert "optimizer.learning_rate=0.003" in error.got
    assert "add optimizer.learning_rate=0.003" in error.todo
    assert "optimizer.learning_rate=0.0005" in error.todo


@pytest.mark.usefixtures("own_files")
def test_the_key_on_the_command_line_settles_it():
    values = compose(["experiment=mine", "optimizer=adamw", "optimizer.learning_rate=0.1"])
    assert values["optimizer"]["learning_rate"] == 0.1
    assert values["trainer"]["steps"] == 7
    assert compose(["experiment=longer"])["optimizer"]["learning_rate"] == 5e-4
    assert compose(["experiment=longer", "sharding=zero1"])["sharding"]["optimizer"] == "all"


@pytest.mark.usefixtures("own_files")
def test_a_users_file_sets_what_the_root_sets(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "long.yaml").write_text("defaults: [stdlib]\nsequence_length: 64\n")
    assert compose(["data=long"])["data"]["sequence_length"] == 64
