"""Draw small faults in the package, and see which of them the tests notice.

    python -m tests.draw_mutants --count 60 --seed 1 --rooms sharding collectives

Each mutant changes one place of one file: a comparison, an operator, a number, a condition, or a
statement that is left out. The tests of the file's room run in a copy of the repository until one
fails. The table says which mutants survived; the last line says how many were killed.
"""

import argparse
import ast
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = {
    "sharding": "tests/engine tests/streams tests/trainer/test_sharding_cases.py "
    "tests/trainer/test_deferred_weights.py tests/trainer/test_update_choice.py",
    "collectives": "tests/collectives tests/engine tests/trainer/test_traffic.py",
    "checkpoint": "tests/checkpoint tests/saving",
    "saving": "tests/saving tests/checkpoint tests/trainer/test_resume.py",
    "launch": "tests/launch tests/membership tests/cli/test_train_command.py",
    "membership": "tests/membership tests/launch tests/recovery",
    "recovery": "tests/recovery tests/membership",
    "trainer": "tests/trainer tests/saving/test_changes.py",
    "engine": "tests/engine",
}
"""Folders and files of tests by the room of the package that they test."""
COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
CALCULATED = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "//",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A changed place of a file."""

    file: Path
    line: int
    before: str
    after: str
    text: str
    """Of the whole file."""


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
            yield Mutant(file, part.lineno, before, after, changed)  # type: ignore[attr-defined]


def changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield the parts of a node that may be replaced, and by what."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        operator = COMPARED[type(node.ops[0])]
        yield node, f"{ast.unparse(node.left)} {operator} {ast.unparse(node.comparators[0])}"
    elif isinstance(node, ast.BinOp) and type(node.op) in CALCULATED and not is_text(node):
        operator = CALCULATED[type(node.op)]
        yield node, f"({ast.unparse(node.left)} {operator} {ast.unparse(node.right)})"
    elif isinstance(node, ast.BoolOp):
        operator = " or " if isinstance(node.op, ast.And) else " and "
        yield node, f"({operator.join(map(ast.unparse, node.values))})"
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
    """Return whether an operation may join or format text."""
    sides = node.left, node.right
    return any(
        isinstance(s, ast.JoinedStr) or isinstance(getattr(s, "value", 0), str) for s in sides
    )


def replaced(text: str, part: ast.expr | ast.stmt, after: str) -> str:
    """Return a text with another source of a part."""
    lines = text.splitlines(keepends=True)
    assert part.end_lineno is not None
    assert part.end_col_offset is not None
    first, last = lines[part.lineno - 1].encode(), lines[part.end_lineno - 1].encode()
    middle = first[: part.col_offset] + after.encode() + last[part.end_col_offset :]
    return "".join([*lines[: part.lineno - 1], middle.decode(), *lines[part.end_lineno :]])


def is_killed(mutant: Mutant, copy: Path, room: str, processes: int) -> str:
    """Return the test that noticed a mutant; empty if none did."""
    target = copy / mutant.file.relative_to(ROOT)
    original = target.read_text()
    target.write_text(mutant.text)
    command = [
        sys.executable, "-m", "pytest", "-x", "-n", str(processes), "-W", "ignore", "--tb=no",
        *TESTS[room].split(),
    ]  # fmt: skip
    try:
        ended = subprocess.run(
            command, cwd=copy, env={"PYTHONPATH": str(copy), "PATH": "/usr/bin:/bin"},
            capture_output=True, text=True, timeout=1200,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "time-out"
    finally:
        target.write_text(original)
    if ended.returncode > 1:  # pytest itself failed
        raise SystemExit(ended.stdout + ended.stderr)
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0][:90] if failed else ""


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Draw mutants, test them and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rooms", nargs="+", default=list(TESTS), choices=TESTS)
    parser.add_argument("--count", type=int, default=60, help="number of mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2, help="processes of each run of tests")
    options = parser.parse_args()
    chosen = random.Random(options.seed)
    found = {
        room: [m for f in sorted((ROOT / "frontier_llm" / room).rglob("*.py")) for m in mutants(f)]
        for room in options.rooms
    }
    killed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "wheels")
        )
        for number in range(options.count):
            room = options.rooms[number % len(options.rooms)]
            mutant, began = chosen.choice(found[room]), time.monotonic()
            by = is_killed(mutant, copy, room, options.processes)
            killed += bool(by)
            place = f"{mutant.file.relative_to(ROOT / 'frontier_llm')}:{mutant.line}"
            change = f"{mutant.before!r} -> {mutant.after!r}"
            result = f"{number + 1:3}  {'killed' if by else 'SURVIVED':8}"
            _say(f"{result}  {time.monotonic() - began:4.0f} s  {place:40}  {change[:120]}  {by}")
    _say(f"{killed} of {options.count} killed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
