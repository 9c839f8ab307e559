"""Check that what the pages name exists: relative links, files in backticks, commands, keys."""

import importlib.util
import re
from pathlib import Path

import pytest

from frontier_llm.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks" / "results" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ROOMS = "benchmarks|conf|docs|examples|frontier_lab|frontier_llm|scripts|tests|tools"
"""Folders of the repository; a path in backticks that begins with one of them must exist."""
IN_BACKTICKS = re.compile(rf"`((?:{ROOMS})/[\w./-]*\w/?|[\w-]+\.(?:py|sh|sbatch|yaml|toml|md))`")
PROGRAM = re.compile(r"frontier-llm +((?:--conf-dir \S+ +)?[a-z][\w-]*)")
MODULE = re.compile(r"python -m +((?:benchmarks|docs|frontier_lab|frontier_llm)[\w.]*)")
MADE_BY_OTHERS = {"config.yaml", "mine.yaml", "my_callbacks.py"}
"""Files that a run or the reader makes."""


def ids(path):
    return str(path.relative_to(ROOT))


def text_of(page):
    return page.read_text()


def anchors(page):
    """Return the anchors of a page's headings, as GitHub and mkdocs form them."""
    headings = re.findall(
        r"^#+ +(.+)$", re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL), re.M
    )
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_relative_link_exists(page):
    dead = []
    for target in LINK.findall(text_of(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_file_in_backticks_exists(page):
    names = {name for name in IN_BACKTICKS.findall(text_of(page)) if name not in MADE_BY_OTHERS}
    tracked = {path.name for folder in ROOMS.split("|") for path in (ROOT / folder).rglob("*.*")}
    tracked |= {path.name for path in ROOT.iterdir()}
    missing = [
        name
        for name in sorted(names)
        if not ((ROOT / name).exists() if "/" in name else name in tracked)
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_command_exists(page):
    text = text_of(page)
    words = (found.split()[-1] for found in PROGRAM.findall(text))
    assert {word for word in words if word not in COMMANDS} == set()
    modules = {name.rstrip(".") for name in MODULE.findall(text)}
    assert {name for name in modules if importlib.util.find_spec(name) is None} == set()


def test_dead_names_are_found(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n[here](#a-page) [gone](gone.md) `frontier_llm/gone.py` `gone.sbatch`\n"
        "frontier-llm gone, python -m benchmarks.gone\n"
    )
    for check in (
        test_every_relative_link_exists,
        test_every_file_in_backticks_exists,
        test_every_command_exists,
    ):
        with pytest.raises(AssertionError, match="gone"):
            check(page)
    monkeypatch.setattr("tests.docs.test_links.COMMANDS", {"gone": None})
    page.write_text("[here](#a-page) frontier-llm gone\n# A page\n")
    test_every_relative_link_exists(page)
    test_every_command_exists(page)
