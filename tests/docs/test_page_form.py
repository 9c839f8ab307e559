"""The form of the pages: short, and with commands that can be copied."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST_WORDS = 55_000
WIDTH = 90
"""Columns of a command that the site shows without a scroll bar."""
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """Return the lines of the page's blocks of commands."""
    return "".join(BLOCK.findall(page.read_text())).splitlines()


def test_the_pages_are_short_enough_to_read():
    assert sum(len(page.read_text().split()) for page in PAGES) <= MOST_WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_can_be_copied(page: Path):
    lines = commands(page)
    assert [line for line in lines if len(line) > WIDTH] == []
    assert [line for line in lines if re.search(r"\S\s{2,}# ", line)] == [], "comment above"
    assert [line for line in lines if re.search(r"\bURL\b|<[a-z ]+>|\.\.\.", line)] == []
