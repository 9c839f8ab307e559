"""Decide the tests and the integer arithmetic of a bash script; None = it is not known."""

import ast
import operator
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.floordiv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge,
    "-lt": operator.lt, "-le": operator.le,
}  # fmt: skip
_UNSET = re.compile(r"\$\w+|\$\{\w+\}")
"""A word that is left when nothing sets a variable."""
UNKNOWN = "?}"
"""The end of the value of a variable that a command sets which may not run, such as `${X?}`."""


def is_open(text: str) -> bool:
    """Return whether a text depends on something that only the shell knows that runs it."""
    return "$" in text or "`" in text


def calculated(text: str, values: Callable[[str], str]) -> int | None:
    """Calculate an expression of integers and of the `values` of variables."""
    if choice := re.fullmatch(r"([^?]+)\?([^?:]+):([^?:]+)", text.strip()):
        text = "({1}) if ({0}) else ({2})".format(*map(str.strip, choice.groups()))

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Name):
            return int(values(node.id))
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            result = _ARITHMETIC[type(node.op)](value(node.left), value(node.right))
            if abs(result) < 10**18:
                return result
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _ARITHMETIC:
            left, right = value(node.left), value(node.comparators[0])
            return int(_ARITHMETIC[type(node.ops[0])](left, right))
        if isinstance(node, ast.IfExp):
            return value(node.body if value(node.test) else node.orelse)
        raise ValueError(text)

    try:
        return value(ast.parse(text[:1000].strip(), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def tested(words: Sequence[str]) -> bool | None:
    """Evaluate the words of `[ ... ]`, `[[ ... ]]` or `test`."""
    is_pattern = words[0] == "[["
    return _either(list(words[1:] if words[0] == "test" else words[1:-1]), is_pattern)


def _either(words: list[str], is_pattern: bool) -> bool | None:
    """Evaluate tests with `and` and `or` between them."""
    for decides, signs in ((True, ("||", "-o")), (False, ("&&", "-a"))):
        for at, word in enumerate(words):
            if word in signs and at:
                left = _either(words[:at], is_pattern)
                right = _either(words[at + 1 :], is_pattern)
                if decides in (left, right):
                    return decides
                return None if None in (left, right) else right
    if words[:1] == ["!"] and len(words) > 1:
        other = _either(words[1:], is_pattern)
        return None if other is None else not other
    return _one(words, is_pattern)


def _one(words: list[str], is_pattern: bool) -> bool | None:
    """Evaluate one test; a variable that nothing sets is empty where a script asks for it."""
    if len(words) == 1:
        words = ["-n", *words]
    if len(words) == 2 and words[0] in ("-z", "-n"):
        text = "" if _UNSET.fullmatch(words[1]) else words[1]
        return None if is_open(text) else (not text) == (words[0] == "-z")
    if any(map(is_open, words)):
        return None
    if words in (["-z"], ["-n"]):
        return words == ["-z"]
    if len(words) == 3:
        left, how, right = words
        if how in ("=", "==", "!="):
            same = left == right or (is_pattern and fnmatchcase(left, right))
            return same == (how != "!=")
        if how in _COMPARED and re.fullmatch("-?[0-9]{1,18}", left or "0"):
            number = re.fullmatch("-?[0-9]{1,18}", right)
            return _COMPARED[how](int(left or 0), int(right)) if number else None
    return None
