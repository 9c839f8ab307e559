"""The pages of `train --help`: complete, short by default, and about what was asked for."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from frontier_llm.cli.compose import groups
from frontier_llm.cli.experiments import comments
from frontier_llm.cli.help import first_sentence, help_text, help_topics
from frontier_llm.cli.package_files import conf_file
from frontier_llm.config.decode import keys
from frontier_llm.errors import ConfigError

ROOT = Path(__file__).parents[2]
LIMIT = 180
"""Characters of a summary, so that it fits on two lines."""
DESCRIBED = {key: doc for key, _, doc in keys()}
SECTIONS = {key.rpartition(".")[0] for key in DESCRIBED} - {""}


def _described_keys(text):
    return [key for key in re.findall(r"^  ([a-z_0-9.]+): ", text, re.M) if key in DESCRIBED]


def test_the_long_page_describes_every_key_choice_and_section_once():
    text = help_text(["all"])
    assert sorted(_described_keys(text)) == sorted(DESCRIBED)
    words = " ".join(text.split())
    assert [key for key, doc in DESCRIBED.items() if doc not in words] == []
    for group, names in groups().items():
        for name in names:
            assert re.search(rf"^    {name}\b", text, re.M), (group, name)
    for section in SECTIONS:
        assert len(re.findall(rf"^{re.escape(section)}\n  \S", text, re.M)) == 1, section
    assert "parallel.tensor: int (1)" in text
    assert "launch.port: int or null (null)" in text


def test_the_short_page_is_short_and_names_every_group():
    text = help_text()
    assert len(text.splitlines()) < 75
    assert len(_described_keys(text)) == 10
    for group in {section.partition(".")[0] for section in SECTIONS} | {"experiment", "sweep"}:
        assert len(re.findall(rf"^  {group} +[A-Z].*\.", text, re.M)) == 1, group
    assert "--help KEY|GROUP" in text
    assert "srun" in text


@pytest.mark.parametrize("topics", [[], ["all"], ["data", "checkpoint.keep"], ["model"]])
def test_lines_fit(topics):
    assert [line for line in help_text(topics).splitlines() if len(line) > 100] == []


def test_a_key_is_described_in_full():
    for key in ("checkpoint.keep", "recompute", "cluster.device.calibration.channels"):
        text = help_text([key])
        assert _described_keys(text) == [key]
        assert " ".join(text.split()).endswith(DESCRIBED[key])


@pytest.mark.parametrize("section", ["data", "engine", "planner", "checkpoint.tiers", "sweep"])
def test_a_group_is_described_with_its_keys_and_choices(section):
    of_section = "planner.engine" if section == "engine" else section
    text = help_text([section])
    expected = [key for key in DESCRIBED if key.startswith(f"{of_section}.")]
    assert sorted(_described_keys(text)) == sorted(expected)
    for name in groups().get(section, []):
        assert re.search(rf"^    {name}\b", text, re.M)


@pytest.mark.parametrize(
    ("topic", "advice"),
    [
        ("checkpoint.kep", "--help checkpoint.keep?"),
        ("keep", "--help checkpoint.keep?"),
        ("dat", "--help data?"),
        ("tensor", "--help parallel.tensor?"),
        ("zero3", "--help sharding?"),
        ("batch_size", "--help data.global_batch?"),
        ("optimizer.lr", "--help optimizer.learning_rate?"),
        ("qqqq", "--help all"),
    ],
)
def test_an_unknown_topic_is_refused_with_a_suggestion(topic, advice):
    with pytest.raises(ConfigError) as refused:
        help_text([topic])
    assert advice in refused.value.todo


def test_a_setting_stands_for_its_key():
    assert help_text(["trainer.steps=5"]) == help_text(["trainer.steps"])
    assert help_text(["model=gpt_22b"]) == help_text(["model"])
    assert help_topics(["--help", "data"]) == help_topics(["--help=data"]) == ["data"]
    assert help_topics(["-h"]) == help_topics(["--help"]) == []


def test_the_first_sentence_of_each_key_is_a_complete_summary():
    for key, doc in DESCRIBED.items():
        summary = first_sentence(doc)
        assert summary.endswith("."), key
        assert len(summary) <= LIMIT, key
        assert summary.count("(") == summary.count(")"), key
        assert "older run" not in doc, f"{key}: of no use to the reader of --help"


def test_the_first_sentence_of_each_file_of_conf_is_a_complete_summary():
    for group, names in groups().items():
        for name in names:
            summary = first_sentence(" ".join(comments(conf_file(group, name))))
            assert summary.endswith("."), (group, name)
            assert len(summary) <= LIMIT, (group, name)


@pytest.mark.parametrize("topics", [["--help", "all"], ["--help"]])
def test_a_reader_that_ends_early_sees_no_error(topics):
    words = [sys.executable, str(ROOT / "train.py"), *topics]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
