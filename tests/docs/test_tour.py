"""The tour names files and functions that exist, and its main path is short enough to read."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "docs" / "tour.md").read_text()
MOST_LINES = {"step": 1700, "gradient": 1600}
MOST_FILES = {"step": 9, "gradient": 7}
ENDS = {
    "step": ("train.py", "frontier_llm/sharding/adamw.py"),
    "gradient": ("frontier_llm/model/linear.py", "frontier_llm/sharding/adamw.py"),
}
"""The first and the last file of each path."""
LINK = re.compile(r"\[`[\w/.]+`\]\(\.\./([\w/.]+)\)")
NAME = re.compile(r"`([A-Za-z_][\w.]*)`")


def stops() -> list[tuple[str, str]]:
    """Return (file, name of a function or class) for everything that the tour tells to read."""
    found = []
    for line in TOUR.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 5 and (link := LINK.search(cells[1])):
            found += [(link[1], name) for name in NAME.findall(cells[2])]
    for link, names in re.findall(r"\]\(\.\./([\w/.]+)\)\s+\((`[^)]+`)\)", TOUR):
        found += [(link, name) for name in NAME.findall(names)]
    return found


def definitions(path: Path) -> set[str]:
    """Return the functions, classes and methods of a file, methods as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
    return names


def test_the_tour_has_stops():
    assert len(stops()) > 40


@pytest.mark.parametrize(("file", "name"), stops())
def test_a_named_function_exists(file, name):
    assert name in definitions(ROOT / file)


@pytest.mark.parametrize("path", ENDS)
def test_a_path_is_short(path):
    table = TOUR.partition(f"<!-- path: {path} -->")[2].partition("<!-- end of path -->")[0]
    files = LINK.findall(table)
    assert (files[0], files[-1]) == ENDS[path]
    assert len(files) <= MOST_FILES[path]
    assert sum(len((ROOT / file).read_text().splitlines()) for file in files) < MOST_LINES[path]
