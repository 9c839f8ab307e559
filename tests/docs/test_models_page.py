"""The table of families says what the files of conf/model/ and the conversion say."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from docs.generate.models_and_clusters_page import models
from frontier_lab.convert.families import FAMILIES, family_for
from frontier_llm.cli.experiments import composed

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def rows() -> list[dict[str, str]]:
    """Return the rows of the first table, by the names of its columns."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    (head, _, *body) = (re.split(r" *\| *", line.strip("| ")) for line in lines)
    end = next(index for index, cells in enumerate(body) if len(cells) != len(head))
    return [dict(zip(head, cells, strict=True)) for cells in body[:end]]


def of_row(row: dict[str, str]) -> list[str]:
    """Return the models that the row describes."""
    patterns = re.findall(r"`([^`]+)`", row["files"])
    return [name for name in models() if any(fnmatch(name, pattern) for pattern in patterns)]


def test_every_model_and_family_has_its_row():
    assert sorted(name for row in rows() for name in of_row(row)) == sorted(models())
    named = {row["family in Hugging Face"].split()[0] for row in rows()}
    assert named == {family.name for family in FAMILIES} - {"t5"}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["family in Hugging Face"])
def test_a_row_says_what_the_files_and_the_conversion_say(row: dict[str, str]):
    name = row["family in Hugging Face"].split()[0]
    family = next(family for family in FAMILIES if family.name == name)
    settings = {
        key: cell for key, cell in row.items() if key not in ("family in Hugging Face", "files")
    }
    for key, value in family.wants.items():
        assert settings.get(key, as_written(value)) == as_written(value), key
    for model in of_row(row):
        config = composed(f"model={model}").model
        assert {key: as_written(getattr(config, key)) for key in settings} == settings
        assert family_for(config, None).name == name


def as_written(value: object) -> str:
    """Return a value as YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
