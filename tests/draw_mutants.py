"""Draw small faults in the package, and see which of them the tests notice.

    python -m tests.draw_mutants --count 60 --seed 1 --rooms sharding collectives

Each mutant changes one place of one file: a comparison, an operator, a number, a condition, or a
statement that is left out. A copy of the repository has all of them, of which one is active in each
run of tests (tests/mutant_runner.py). The table says which test killed a mutant and which mutants
survived the tests of the file's room. "endless" are those with which tests ran for five times as
long as without: look at them yourself.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULE = """import os

_known = set()

def is_active(mutant):
    if "MUTANT" in os.environ:
        return os.environ["MUTANT"] == str(mutant)
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if (mutant, test) not in _known:
        _known.add((mutant, test))
        file = os.open("FOLDER/reached", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{mutant}\\t{test}\\n".encode())
        os.close(file)
    return False
"""
"""Tells whether a mutant is active; if none is, notes in a file which test reaches a mutant."""
ROOT = Path(__file__).parents[1]
TESTS = {
    "sharding": "tests/engine tests/streams tests/trainer/test_sharding_cases.py "
    "tests/trainer/test_deferred_weights.py tests/trainer/test_update_choice.py "
    "tests/trainer/test_adafactor.py tests/trainer/test_muon.py "
    "tests/trainer/test_update_groups.py",
    "collectives": "tests/collectives tests/engine tests/trainer/test_traffic.py "
    "tests/trainer/test_block_codes.py",
    "checkpoint": "tests/checkpoint tests/saving tests/streams/test_snapshot.py "
    "tests/cli/test_inspect_checkpoint.py tests/recovery/test_partner_copies.py",
    "saving": "tests/saving tests/checkpoint tests/trainer/test_resume.py",
    "launch": "tests/launch tests/membership tests/cli/test_train_command.py",
    "membership": "tests/membership tests/launch tests/recovery",
    "recovery": "tests/recovery tests/membership",
    "trainer": "tests/trainer tests/saving/test_changes.py",
    "engine": "tests/engine",
}
"""Folders and files of tests by the room of the package that they test."""
COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
CALCULATED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A changed place of a file."""

    file: Path
    part: ast.expr | ast.stmt
    before: str
    after: str

    def __str__(self) -> str:
        place = f"{self.file.relative_to(ROOT / 'frontier_llm')}:{self.part.lineno}"
        return f"{place:40}  {self.before!r} -> {self.after!r}"[:160]


def mutants(file: Path) -> Iterator[Mutant]:
    """Yield all mutants of a file that can still be read."""
    text = file.read_text()
    for node in ast.walk(ast.parse(text)):
        for part, after in changes(node):
            before = ast.get_source_segment(text, part)
            if before is None or before == after:
                continue
            changed = replaced(text, part, after)
            try:
                ast.parse(changed)
            except SyntaxError:
                continue
            yield Mutant(file, part, before, after)


def changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield the parts of a node that may be replaced, and by what."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        operator = COMPARED[type(node.ops[0])]()
        yield node, ast.unparse(ast.Compare(node.left, [operator], node.comparators))
    elif isinstance(node, ast.BinOp) and type(node.op) in CALCULATED and not is_text(node):
        calculated = ast.BinOp(node.left, CALCULATED[type(node.op)](), node.right)
        yield node, f"({ast.unparse(calculated)})"
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, ast.unparse(node.operand)
    elif isinstance(node, ast.If | ast.While):
        yield node.test, f"not ({ast.unparse(node.test)})"
    elif isinstance(node, ast.FunctionDef):
        for statement in ast.walk(node):
            is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            if is_call or isinstance(statement, ast.AugAssign):
                yield statement, "pass"  # type: ignore[misc]
            elif isinstance(statement, ast.Constant) and type(statement.value) is int:
                yield statement, str(statement.value + 1)


def is_text(node: ast.BinOp) -> bool:
    """Return whether an operation may join or format text, or repeat a list."""
    sides = node.left, node.right
    return any(
        isinstance(s, ast.JoinedStr | ast.List) or isinstance(getattr(s, "value", 0), str)
        for s in sides
    )


def replaced(text: str, part: ast.expr | ast.stmt, after: str) -> str:
    """Return a text with another source of a part."""
    lines = text.splitlines(keepends=True)
    assert part.end_lineno is not None
    assert part.end_col_offset is not None
    first, last = lines[part.lineno - 1].encode(), lines[part.end_lineno - 1].encode()
    middle = first[: part.col_offset] + after.encode() + last[part.end_col_offset :]
    return "".join([*lines[: part.lineno - 1], middle.decode(), *lines[part.end_lineno :]])


class Inserter(ast.NodeTransformer):
    """Inserts mutants, by their index: each is used if it is active, else what was there before."""

    def __init__(self, places: dict[int, Mutant]) -> None:
        self._places = places

    def visit(self, node: ast.AST) -> Any:
        """Insert the mutants of a node and of what is in it."""
        position, mutated = _position(node), self.generic_visit(node)
        for index, mutant in self._places.items():
            if _position(mutant.part) == position:
                active = ast.parse(f"_is_active({index})", mode="eval").body
                other: Any = ast.parse(mutant.after).body[0]
                if isinstance(node, ast.stmt):
                    mutated = ast.If(active, [other], [mutated])  # type: ignore[list-item]
                else:
                    mutated = ast.IfExp(active, other.value, mutated)  # type: ignore[arg-type]
        return mutated


def _position(node: ast.AST) -> tuple[Any, ...]:
    names = "lineno", "col_offset", "end_lineno", "end_col_offset"
    return type(node), *(getattr(node, name, None) for name in names)


def insert(file: Path, places: dict[int, Mutant]) -> str:
    """Return the text of a file with mutants."""
    tree = ast.fix_missing_locations(Inserter(places).visit(ast.parse(file.read_text())))
    after = 1 + ("__future__" in ast.unparse(tree.body[1]))
    tree.body[after:after] = ast.parse(
        "from frontier_llm.mutants import is_active as _is_active"
    ).body
    return ast.unparse(tree)


def run_tests(copy: Path, rooms: list[str], drawn: dict[int, tuple[str, Mutant]]) -> int:
    """Insert mutants in a copy of the repository, and run the tests of their rooms with each."""
    for file in {mutant.file for _, mutant in drawn.values()}:
        places = {i: mutant for i, (_, mutant) in drawn.items() if mutant.file == file}
        (copy / file.relative_to(ROOT)).write_text(insert(file, places))
    (copy / "frontier_llm/mutants.py").write_text(MODULE.replace("FOLDER", str(copy.parent)))
    tasks = [
        {
            "tests": TESTS[room].split(),
            "mutants": {i: str(m) for i, (other, m) in drawn.items() if other == room},
            "stems": [m.file.stem for other, m in drawn.values() if other == room],
        }
        for room in rooms
    ]
    (copy.parent / "rooms").write_text(json.dumps(tasks))
    tests = sorted({name for room in rooms for name in TESTS[room].split()})
    command = [
        sys.executable, "-m", "pytest", "-s", "-n", "0", "-W", "ignore", "--tb=no",
        "-p", "tests.mutant_runner", *tests,
    ]  # fmt: skip
    environ = {
        "PYTHONPATH": str(copy), "MUTANTS_FOLDER": str(copy.parent), "TMPDIR": str(copy.parent),
        "PATH": os.environ["PATH"], "HOME": os.environ["HOME"],
    }  # fmt: skip
    return subprocess.run(command, cwd=copy, env=environ, check=False).returncode


def main() -> int:
    """Draw mutants, test them and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rooms", nargs="+", default=list(TESTS), choices=TESTS)
    parser.add_argument("--count", type=int, default=60, help="number of mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--numbers", nargs="+", type=int, help="of the drawn mutants, only these")
    options = parser.parse_args()
    chosen = random.Random(options.seed)
    found = {
        room: [m for f in sorted((ROOT / "frontier_llm" / room).rglob("*.py")) for m in mutants(f)]
        for room in options.rooms
    }
    rooms = [options.rooms[number % len(options.rooms)] for number in range(options.count)]
    drawn = {i: (room, chosen.choice(found[room])) for i, room in enumerate(rooms)}
    if options.numbers:
        drawn = {number - 1: drawn[number - 1] for number in options.numbers}
    left_out = shutil.ignore_patterns(".git", ".venv*", "runs", "wheels", ".hypothesis")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        shutil.copytree(ROOT, Path(folder) / "copy", ignore=left_out)
        return run_tests(Path(folder) / "copy", options.rooms, drawn)


if __name__ == "__main__":
    raise SystemExit(main())
