"""A key that was renamed goes on working under its old name, wherever that is written."""

import pytest
import yaml

from frontier_llm.cli import compose as composition
from frontier_llm.cli.compose import compose
from frontier_llm.cli.package_files import CONF_DIR_VARIABLE
from frontier_llm.cli.sweep_trials import Trial
from frontier_llm.cli.trial_runner import finished_trial
from frontier_llm.config import decode
from frontier_llm.config.decode import keys
from frontier_llm.config.renamed import RENAMED_KEYS, current_override, with_current_names
from frontier_llm.errors import ConfigError
from frontier_llm.trainer.changes import changes

VALUES = {"data.pieces": 300, "launch.point_minutes": 2.5, "launch.point_value": "loss"}


def _at(values, key):
    for part in key.split("."):
        values = values[part]
    return values


@pytest.fixture
def said(capsys):
    """Read what was printed; a new name is printed once per process."""
    composition._announce.cache_clear()
    return lambda: capsys.readouterr().err


def test_the_table_names_keys_that_exist_and_old_ones_that_do_not():
    known = {name for name, _, _ in keys()}
    assert set(RENAMED_KEYS.values()) <= known
    assert not set(RENAMED_KEYS) & known
    assert set(VALUES) == set(RENAMED_KEYS)


@pytest.mark.parametrize("old", RENAMED_KEYS)
def test_an_override_by_an_old_name_takes_effect_and_says_the_new_name_once(old, said):
    for _ in range(2):
        values = compose([f"{old}={VALUES[old]}"])
    assert _at(values, RENAMED_KEYS[old]) == VALUES[old]
    assert said() == f"{old} is now {RENAMED_KEYS[old]}\n"
    with pytest.raises(KeyError):
        _at(values, old)


def test_signs_before_an_old_name_and_signs_in_values_are_kept():
    assert current_override("~data.pieces") == "~data.vocabulary"
    assert current_override("+data.pieces=3") == "+data.vocabulary=3"
    assert current_override("run.dir=data.pieces=3") == "run.dir=data.pieces=3"


def test_an_old_configuration_that_is_read_back_is_decoded():
    old = compose(["data.vocabulary=300", "launch.trial_minutes=2.5"])
    old["data"]["pieces"] = old["data"].pop("vocabulary")
    old["launch"]["point_minutes"] = old["launch"].pop("trial_minutes")
    old["run"]["allow_changes"] = ["data.pieces", "model"]
    before = yaml.safe_dump(old)
    config = decode(old)
    assert (config.data.vocabulary, config.launch.trial_minutes) == (300, 2.5)
    assert config.run.allow_changes == ("data.vocabulary", "model")
    assert yaml.safe_dump(old) == before


def test_a_checkpoint_with_an_old_name_differs_by_values_alone():
    now = {"data": {"vocabulary": 300, "kind": "text"}}
    assert changes({"data": {"pieces": 300, "kind": "text"}}, now) == {}
    assert changes({"data": {"pieces": 200, "kind": "text"}}, now) == {
        "data.vocabulary": (200, 300)
    }


def test_old_files_win_over_defaults_and_the_command_line_over_old_files(
    tmp_path, monkeypatch, said
):
    monkeypatch.setenv(CONF_DIR_VARIABLE, str(tmp_path))
    for group, text in {
        "data": "defaults: [stdlib]\npieces: 500\n",
        "experiment": "# @package _global_\nlaunch: {point_minutes: 3.0}\n",
    }.items():
        (tmp_path / group).mkdir()
        (tmp_path / group / "old.yaml").write_text(text)
    config = decode(compose(["experiment=old", "data=old"]))
    assert (config.data.vocabulary, config.launch.trial_minutes) == (500, 3.0)
    assert "data.pieces is now data.vocabulary" in said()
    assert decode(compose(["data=old", "data.vocabulary=600"])).data.vocabulary == 600
    assert decode(compose(["data=old", "data.pieces=700"])).data.vocabulary == 700


def test_a_reference_to_an_old_name_is_refused_with_the_new_name():
    with pytest.raises(ConfigError) as caught:
        compose(["model.vocabulary=${data.pieces}"])
    assert "data.pieces is now data.vocabulary" in caught.value.todo


def test_a_finished_trial_of_an_old_sweep_is_recognised(tmp_path):
    Trial(["data.pieces=300"], "done", "", 1.0, 2.0, None, None, None).write(tmp_path)
    assert finished_trial(["data.vocabulary=300"], tmp_path) is not None
    with pytest.raises(ConfigError):
        finished_trial(["data.vocabulary=400"], tmp_path)


def test_values_without_old_names_stay_as_they_are():
    values = {"data": {"vocabulary": 1}, "plan": "off"}
    assert with_current_names(values) == values
