"""The rules of the source tree: sizes of files and functions, names, and how modules are found."""

import ast
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import LONGEST

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "frontier_llm", ROOT / "frontier_lab")
ROOMS = (
    "frontier_llm",
    "frontier_lab",
    "benchmarks",
    "docs",
    "examples",
    "tests",
    "tools",
    "train.py",
    ".ci",
)
SHIM_LINES, TRAIN_LINES, FILE_LINES, FUNCTION_LINES = 15, 40, 500, 60
MOST_WORDS = 12
"""Words of the name of a test, besides `test`."""
ALWAYS_SHARED = {"__init__.py", "main.py"}
CONFIG = "config/ mirrors conf/"
COMMAND = "a file of cli/ has the name of its command"
SHARED_BASENAMES = {
    "dry_run.py": COMMAND,
    "evaluate.py": COMMAND,
    "launch.py": CONFIG,
    "watchdog.py": CONFIG,
}
"""Basenames that several files of both packages have, and the reason."""
LONG_FILES: dict[str, str] = {}
"""Files of both packages with more than FILE_LINES lines, and the reason why they are one file."""
LONG_FUNCTIONS: dict[str, str] = {}
"""Functions that are too long, and the reason."""
SEARCH_PATH_FILES = {
    "frontier_llm/config/reading.py": "a user's modules are in this folder",
    "tests/examples/test_trainers.py": "python adds the folder of a script that it runs",
}
"""Files that change the list where Python looks for modules, and the reason."""


def sources() -> list[Path]:
    """Return the Python files of the repository, without those of environments and runs."""
    found = [ROOT / room for room in ROOMS]
    files = [path for path in found if path.is_file()]
    return sorted([*files, *(path for room in found for path in room.rglob("*.py"))])


def lines(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text().splitlines())


def name(path: Path) -> str:
    """Return the path of a file relative to the repository."""
    return path.relative_to(ROOT).as_posix()


def long_functions(path: Path) -> list[str]:
    """Return the functions of a file that have more than FUNCTION_LINES lines."""
    return [
        f"{name(path)}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES
    ]


def changes_sys_path(path: Path) -> bool:
    """Return whether a file changes the list where Python looks for modules."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    changes = {"sys.path.insert", "sys.path.append", "site.addsitedir"}
    return any(ast.unparse(call.func) in changes for call in calls)


def shared_basenames(*packages: Path) -> dict[str, list[str]]:
    """Return the basenames that several files of some packages have, with these files."""
    files = defaultdict(list)
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            files[path.name].append(path.relative_to(package).as_posix())
    return {
        basename: found
        for basename, found in files.items()
        if len(found) > 1 and basename not in ALWAYS_SHARED
    }


def module_imports(root: Path, packages: tuple[Path, ...]) -> dict[str, set[str]]:
    """Return the modules of the packages that each module imports, also late or for types only."""
    files = [path for package in packages for path in package.rglob("*.py")]
    modules = {".".join(path.relative_to(root).with_suffix("").parts): path for path in files}
    modules = {module.removesuffix(".__init__"): path for module, path in modules.items()}
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        named: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                parts = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= (parts & modules.keys()) or {node.module}
            elif isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
        found[module] = named & modules.keys() - {module}
    return found


def test_the_files_are_found():
    names = set(map(name, sources()))
    assert {"train.py", "tests/test_house.py", "frontier_llm/cli/main.py"} <= names


def test_tools_and_train_only_call_the_program():
    tools = sorted((ROOT / "tools").glob("*.py"))
    assert tools
    assert [name(path) for path in tools if lines(path) > SHIM_LINES] == []
    assert lines(ROOT / "train.py") < TRAIN_LINES


def test_files_are_short():
    files = [path for package in PACKAGES for path in package.rglob("*.py")]
    found = {name(path) for path in files if lines(path) > FILE_LINES}
    assert found == set(LONG_FILES), "shorten the file, or remove an entry that is out of date"


def test_names_of_tests_are_short():
    names = [
        node.name
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert [name for name in names if len(name.split("_")) - 1 > MOST_WORDS] == []


def test_functions_are_short():
    found = [text for path in sources() for text in long_functions(path)]
    assert [text for text in found if text.split()[1].rstrip(":") not in LONG_FUNCTIONS] == []
    names = {text.split()[1].rstrip(":") for text in found}
    assert LONG_FUNCTIONS.keys() <= names, "remove an entry that is out of date"


def test_modules_are_found_without_changing_the_search_path():
    found = {name(path) for path in sources() if changes_sys_path(path)}
    assert found == set(SEARCH_PATH_FILES)


def test_no_modules_import_each_other():
    TopologicalSorter(module_imports(ROOT, PACKAGES)).prepare()


def test_modules_that_import_each_other_are_found(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").write_text("from package import b")
    (tmp_path / "package" / "b.py").write_text("def late():\n    import package.a")
    with pytest.raises(CycleError):
        TopologicalSorter(module_imports(tmp_path, (tmp_path / "package",))).prepare()


def test_basenames_are_unique_or_have_a_reason():
    found = shared_basenames(*PACKAGES)
    assert {key: found[key] for key in found.keys() - SHARED_BASENAMES.keys()} == {}, "rename one"
    assert SHARED_BASENAMES.keys() - found.keys() == set(), "remove the entry"
    assert all(SHARED_BASENAMES.values()), "give a reason"


def test_the_longest_test_files_exist():
    assert [name for name in LONGEST if not (ROOT / "tests" / f"{name}.py").exists()] == []


# Each rule fails if it is broken.


def test_a_long_function_and_a_changed_search_path_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.test_house.ROOT", tmp_path)
    path = tmp_path / "bad.py"
    body = "    pass\n" * FUNCTION_LINES
    path.write_text(f"import sys\nsys.path.insert(0, '')\nclass A:\n  def long(self):\n{body}")
    assert changes_sys_path(path)
    assert long_functions(path) == [f"bad.py:4 long: {FUNCTION_LINES + 1} lines"]


@pytest.mark.parametrize(("basename", "is_shared"), [("units.py", True), ("__init__.py", False)])
def test_a_shared_basename_is_found(tmp_path, basename, is_shared):
    for room in ("a", "b"):
        (tmp_path / room).mkdir()
        (tmp_path / room / basename).touch()
    assert (basename in shared_basenames(tmp_path)) == is_shared


def test_every_property_test_draws_as_many_examples_as_the_profile_says():
    own = [
        name(path) for path in (ROOT / "tests").rglob("*.py") if "max_examples=" in path.read_text()
    ]
    assert sorted(own) == ["tests/properties.py", "tests/test_house.py"], "use @examples"
