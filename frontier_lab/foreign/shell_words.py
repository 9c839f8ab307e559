"""Read the words of the commands of a bash script, without running it.

Variables, arrays, `+=`, line continuations, integer arithmetic and default values (`${X:-1}`) are
followed, and so are `if` and `case` on known values, functions and sourced files. A variable that
nothing sets counts as empty where a script asks for it (`[ -z "$X" ]`). Else what only the shell
that runs the script knows, such as `$1` or `$(hostname)`, stays in a word as it is written. A loop
is read once, with its last value.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import dropwhile
from pathlib import Path

# lengths are bounded, so that no text takes quadratic time
_INNER = r"(?:[^()]|\((?:[^()]|\([^()]{0,400}\)){0,400}\)){0,400}"
_BRACES = r"\$\{(?:[^{}\n]|\$\{[^{}\n]{0,200}\}){0,200}\}"
_QUOTES = rf"(?:\\.|\$\({_INNER}\)|[^\"\\$]|\$(?!\())*"
"""What double quotes may contain, with quotes within `$(...)`."""
_TOKEN = re.compile(
    rf"""(?P<space>(?:[ \t\r]|\\\r?\n)+)
    |(?P<comment>(?<![^\s;&|()])\#[^\n]*)
    |(?P<heredoc><<-?[ \t]*(?P<quote>['"]?)(?P<end>\w+)(?P=quote))
    |(?P<operator>\n|;;|;|&&|\|\||\||&|\(|\)|[0-9]?[<>]+&?)
    |(?P<word>(?:\\.|'[^']*'|"{_QUOTES}"|"(?:\\.|[^"\\])*"|\$\({_INNER}\)|{_BRACES}|`[^`\n]*`
      |[^\s;&|()<>'"\\`])+)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_PIECE = re.compile(
    rf"""'(?P<literal>[^']*)'|"(?P<quoted>{_QUOTES}|(?:\\.|[^"\\])*)"|\\(?P<escaped>\n|.)
    |(?P<variable>\$\(\({_INNER}\)\)|\$\({_INNER}\)|{_BRACES}|\$(?:\w+|[@*])|`[^`\n]*`)
    |(?P<plain>[^'"\\$`]+|.)""",
    re.VERBOSE | re.DOTALL,
)
_WORDS = re.compile(rf"(?:\$\({_INNER}\)|\S)+")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(r"\$\{?(\w+|[@*])(?:\[[@*]\])?(?:(:?[-=])(.*))?\}?", re.DOTALL)
_ARITHMETIC_TEST = re.compile(r"\b((?:el)?if)[ \t]*\(\(([^()\n]{1,200})\)\)")
_SEPARATORS = {"\n", ";", "&&", "||", "|", "&", ";;", "(", ")"}
_DECLARES = {"export", "local", "declare", "readonly", "typeset"}
_SKIPPED = {"then", "do", "else", "fi", "esac", "done", "{", "}", "!", "time", "exec", "eval"}
MOST_WORDS, LONGEST, DEEPEST, MOST_CALLS = 50_000, 1_000_000, 20, 500
"""Limits of the words of a variable, of its characters, of variables and calls within each other,
and of all calls."""
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


Command = tuple[str, list[str]]
"""The operator before a command, and its raw words."""


@dataclass
class Script:
    """The commands of a script, with the values of its variables put in."""

    commands: list[list[str]] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)
    undecided: list[str] = field(default_factory=list)
    """Conditions that depend on something unknown; the commands below them are left out."""
    unread: list[str] = field(default_factory=list)
    """Files that it sources and that were not found."""
    folder: Path | None = None
    """Where files are looked for that it sources."""
    functions: dict[str, list[Command]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    """Functions and files in the order in which they were read."""


@dataclass
class _Branch:
    """An open `if` or `case`."""

    taken: bool | None = False
    """Whether its commands are read; None: those of all further branches are left out."""
    unknown: str = ""
    """The condition, if it is not known."""
    value: str | None = None
    """Of a `case`."""
    patterns: list[str] | None = None
    """Those of the next branch of a `case`, while they are read."""


def read_script(
    text: str,
    variables: dict[str, list[str]] | None = None,
    depth: int = 0,
    folder: Path | None = None,
) -> Script:
    """Read a script; `variables` are known from outside, sourced files are in `folder`."""
    script = Script(variables=variables or {}, folder=folder)
    _read(text, script, depth)
    if not any(word.startswith("--") for words in script.commands for word in words):
        for name in [name for name in script.functions if name not in script.calls]:
            _read_commands(script.functions[name], script, depth)  # a file of functions
    return script


def _read(text: str, script: Script, depth: int) -> None:
    text = _ARITHMETIC_TEST.sub(r"\1 [ $((\2)) -ne 0 ]", text)
    _read_commands(list(_simple_commands(text)), script, depth)


def _read_commands(commands: Sequence[Command], script: Script, depth: int) -> None:
    branches: list[_Branch] = []
    condition: list[Command] | None = None
    place = 0
    while place < len(commands):
        joiner, words = commands[place]
        after = _defined(commands, place, script)
        place = after or place + 1
        if after or _reads_case(joiner, words, branches, script):
            continue
        first = words[0] if words else ""
        if first in ("if", "elif"):
            branches += [_Branch()] if first == "if" else []
            if branches and branches[-1].taken:
                branches[-1].taken = None
            condition = [(joiner, words[1:])]
        elif condition is not None and first != "then":
            condition.append((joiner, words))
        elif first in ("then", "else") and branches:
            _enter(branches, condition if first == "then" else None, script)
            condition = None
        if first in ("fi", "esac"):
            branches = branches[:-1]
        if condition is None:
            _run_if_taken(words, branches, script, depth)


def _run_if_taken(
    words: Sequence[str], branches: Sequence[_Branch], script: Script, depth: int
) -> None:
    """Run a command; or note an unknown condition above it, if it sets or gives something."""
    if all(branch.taken for branch in branches):
        _run(list(dropwhile(_SKIPPED.__contains__, words)), script, depth)
        return
    unknown = next((each.unknown for each in branches if each.unknown), "")
    matters = any(_ASSIGNMENT.fullmatch(word) or word.startswith("--") for word in words)
    if unknown and matters and unknown not in script.undecided:
        script.undecided.append(unknown)


def _defined(commands: Sequence[Command], place: int, script: Script) -> int:
    """Keep the function that is defined at a place; return the place after it, or 0."""
    words = commands[place][1]
    named = len(words) > 1 and words[0] == "function"
    operators = [joiner for joiner, _ in commands[place + 1 : place + 3]]
    if not named and (len(words) != 1 or operators != ["(", ")"]):
        return 0
    name, rest, at = words[named], words[2:], place + 1
    while at < len(commands) and not rest:  # to the opening brace
        rest, at = commands[at][1], at + 1
    if rest[:1] != ["{"]:
        return 0
    body, depth = [("\n", rest[1:])], 1
    while at < len(commands) and depth:
        first = (commands[at][1] or [""])[0]
        depth += (first == "{") - (first == "}")
        body.append(commands[at])
        at += 1
    script.functions[name] = body
    return at


def _call(words: Sequence[str], script: Script, depth: int) -> None:
    """Read the body of a function with its arguments."""
    script.calls.append(words[0])
    if len(script.calls) > MOST_CALLS:
        return
    outer = {name: value for name, value in script.variables.items() if not name.isidentifier()}
    _set_arguments(words[1:], script)
    _read_commands(script.functions[words[0]], script, depth + 1)
    _set_arguments([], script)
    script.variables |= outer


def _printed(words: Sequence[str], script: Script, depth: int) -> list[str]:
    """Return what a function prints by its last `echo`."""
    inner = replace(script, commands=[], variables=dict(script.variables))
    _call(words, inner, depth + 1)
    printed = [command[1:] for command in inner.commands if command[0] == "echo"]
    return [" ".join(printed[-1])] if printed else []


def _set_arguments(words: Sequence[str], script: Script) -> None:
    for name in [name for name in script.variables if not name.isidentifier()]:
        del script.variables[name]
    script.variables |= {str(index): [word] for index, word in enumerate(words, 1)}
    script.variables |= {"@": list(words), "*": list(words), "#": [str(len(words))]}


def _source(word: str, script: Script, depth: int) -> None:
    """Read a file that is sourced, if it lies below the folder of the script."""
    file = (script.folder or Path()) / re.sub(r"^.{0,200}[)}`]/|^\$\w+/", "", word[:500])
    script.calls.append(word)
    reads = script.folder and depth < DEEPEST and len(script.calls) < MOST_CALLS
    try:
        text = file.read_text() if reads and file.stat().st_size < LONGEST else ""
    except (OSError, ValueError):
        text = ""
    if text:
        _read(text, script, depth + 1)
    else:
        script.unread.append(word)


def _enter(
    branches: Sequence[_Branch], condition: Sequence[tuple[str, list[str]]] | None, script: Script
) -> None:
    """Decide whether the commands after `then` or `else` are read."""
    last = branches[-1]
    if last.taken is not False:
        last.taken = None
    elif all(branch.taken for branch in branches[:-1]):
        last.taken = True if condition is None else _holds(condition, script)
        if last.taken is None:
            text = " ".join(" ".join(words) for _, words in condition or ())
            last.unknown = f"if {text[:80]}"


def _reads_case(joiner: str, words: Sequence[str], branches: list[_Branch], script: Script) -> bool:
    """Read `case X in`, or patterns of its branches; return whether the words are read."""
    last = branches[-1] if branches else None
    if words[:1] == ["case"] and len(words) > 2 and words[2] == "in":
        value = " ".join(_expanded(words[1], script, splits=False))
        is_known = "$" not in value and "`" not in value
        branches.append(_Branch(False if is_known else None, "", value, list(words[3:])))
        if not is_known:
            branches[-1].unknown = f"case {words[1]}"
        return True
    if last is None or last.value is None:
        return False
    if joiner == ";;" and last.patterns is None:
        last.taken, last.patterns = None if last.taken else last.taken, []
    if last.patterns is None or words[:1] == ["esac"]:
        return False
    if joiner != ")":
        last.patterns += words
        return True
    if last.taken is False:
        texts = [" ".join(_expanded(each, script, splits=False)) for each in last.patterns]
        last.taken = any(fnmatchcase(last.value, text) for text in texts)
    last.patterns = None
    return False


def _simple_commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the raw words of each command, and the operator before it; arrays are one word."""
    joiner, words, place = "\n", list[str](), 0
    array = redirects = False
    endless: set[str] = set()
    while found := _TOKEN.match(text, place):
        place = found.end()
        kind, token = found.lastgroup, found.group()
        if found["heredoc"]:
            end = f"\n{found['end']}\n"
            after = -1 if end in endless else f"{text}\n".find(end, place)
            place = min(len(text), after + len(end) - 1) if after >= 0 else place
            endless |= {end} if after < 0 else set()
            continue
        if found["operator"] is None:
            if kind in ("word", "other") and not redirects:
                words.append(token)
            redirects = redirects and kind == "space"
        elif token == "(" and words and words[-1].endswith("=") and text[found.start() - 1] == "=":
            array = True
            words.append(token)
        elif array:
            array = token != ")"
            words += [token] if token == ")" else []
        elif token in _SEPARATORS:
            yield joiner, words
            joiner, words = token, []
        else:
            redirects = True  # the next word is a file
    yield joiner, words


def _run(words: Sequence[str], script: Script, depth: int) -> None:
    """Assign variables, or append a command with expanded words."""
    rest = list(words)
    if rest[:1] == ["for"] and rest[2:3] == ["in"]:
        _loop(rest, script)
        return
    if rest and rest[0] in _DECLARES:
        rest = list(dropwhile(lambda word: word.startswith("-"), rest[1:]))
    rest = _assign(rest, script)
    if words and words[0] in _DECLARES:
        return
    if rest[:1] in (["source"], ["."]) and len(rest) > 1:
        _source(" ".join(_expanded(rest[1], script, splits=False)), script, depth)
        return
    command: list[str] = []
    for part in (part for word in rest for part in _expanded(word, script)):
        inner = re.search(r"\s--\w", part) and depth < 3
        nested = read_script(part, dict(script.variables), depth + 1) if inner else Script()
        command += [each for words in nested.commands for each in words] or [part]
    if command[:1] == ["shift"] and "@" in script.variables:
        count = int(command[1][:3]) if command[1:2] and command[1].isdecimal() else 1
        _set_arguments(script.variables["@"][count:], script)
    elif command and command[0] in script.functions and depth < DEEPEST:
        _call(command, script, depth)
    elif command:
        script.commands.append(command[:MOST_WORDS])


def _loop(words: Sequence[str], script: Script) -> None:
    """Set the variable of `for X in ...` to its last value."""
    values = [part for word in words[3:] for part in _expanded(word, script)]
    script.variables[words[1]] = values[-1:] or [""]
    if len(values) > 1:
        text = f"for {words[1]} in {' '.join(values)[:60]}"
        script.undecided.append(f"{text} (planned with its last value)")


def _assign(words: Sequence[str], script: Script) -> list[str]:
    """Assign the variables at the beginning of a command; return its other words."""
    rest = list(words)
    while rest and (found := _ASSIGNMENT.fullmatch(rest[0])):
        name, adds, value = found.groups()
        if rest[1:2] == ["("]:
            end = rest.index(")") if ")" in rest else len(rest)
            values = [part for word in rest[2:end] for part in _expanded(word, script)]
            old = script.variables.get(name, []) if adds else []
            script.variables[name] = [*old, *values][:MOST_WORDS]
            rest = rest[end + 1 :]
            continue
        text = " ".join(_expanded(value, script, splits=False))
        if adds:
            text = " ".join(script.variables.get(name, [])) + text
        script.variables[name] = [text[:LONGEST]]
        rest = rest[1:]
    return rest


def _expanded(word: str, script: Script, *, splits: bool = True, depth: int = 0) -> list[str]:
    """Return the words that a raw word stands for."""
    fields: list[str] = []
    current: str | None = None
    for piece in _PIECE.finditer(word):
        if piece["variable"] is not None:
            values = _values(piece["variable"], script, depth)
            splits_it = splits and values != [piece["variable"]]
            splits_value = split_words if splits_it else lambda value: [value]
            parts = [part for value in values for part in splits_value(value)]
        elif piece["quoted"] is not None:
            if re.fullmatch(r"\$\{\w+\[@\]\}|\$@|\$\{@\}", piece["quoted"]):
                parts = _values(piece["quoted"], script, depth)
            else:
                parts = [" ".join(_expanded_quotes(piece["quoted"], script, depth))]
        else:
            escaped = (piece["escaped"] or "").strip("\n")
            parts = [piece["literal"] or escaped or piece["plain"] or ""]
        for index, part in enumerate(parts):
            if index and current is not None:
                fields.append(current)
                current = None
            current = ((current or "") + part)[:LONGEST]
    return [*fields, *([] if current is None else [current])][:MOST_WORDS]


def split_words(text: str) -> list[str]:
    """Split a text at blanks, but not within `$(...)`."""
    return _WORDS.findall(text) if "$(" in text else text.split()


def _expanded_quotes(text: str, script: Script, depth: int) -> list[str]:
    """Expand the variables of a text in double quotes."""

    def expand(piece: re.Match[str]) -> str:
        if piece["variable"] is not None:
            return " ".join(_values(piece["variable"], script, depth))
        return "" if piece["escaped"] == "\n" else piece["escaped"] or piece.group()

    return [_PIECE.sub(expand, text.replace("'", "\0")).replace("\0", "'")[:LONGEST]]


def _values(reference: str, script: Script, depth: int) -> list[str]:
    """Return the values of `$X`, `${X:-1}`, `${X[@]}` or `$((X * 2))`; unknown ones unchanged."""
    if depth > DEEPEST:
        return [reference]
    if re.match(r"`\s*#", reference):  # a comment within a command
        return []
    if reference.startswith("$(("):
        number = _calculated(reference[3:-2], script)
        return [reference if number is None else str(number)]
    called = re.fullmatch(r"\$\(\s*(\w+)([^()|;]*)\)", reference, re.DOTALL)
    if called and called[1] in script.functions:
        return _printed([called[1], *_expanded(called[2], script, depth=depth + 1)], script, depth)
    found = _PARAMETER.fullmatch(reference)
    if found is None:
        return [reference]
    name, has_default, default = found.groups()
    known = script.variables.get(name)
    if known is not None and (any(known) or has_default in (None, "-", "=")):
        return known
    if has_default:
        values = _expanded((default or "").removesuffix("}"), script, depth=depth + 1)
        if "=" in has_default:
            script.variables[name] = values
        return values
    return [reference]


def _calculated(text: str, script: Script) -> int | None:
    """Calculate an expression of integers and variables; None = it is not known."""
    names = re.sub(r"\$\{(\w+)\}|\$(\w+)", r"\1\2", text).strip()
    if choice := re.fullmatch(r"([^?]+)\?([^?:]+):([^?:]+)", names):
        names = "({1}) if ({0}) else ({2})".format(*map(str.strip, choice.groups()))

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Name):
            return int(" ".join(script.variables.get(node.id, [])))
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
        return value(ast.parse(names[:1000], mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _holds(condition: Sequence[tuple[str, list[str]]], script: Script) -> bool | None:
    """Evaluate `[ a = b ] || [ ... ]`; None = it is not known."""
    result: bool | None = None
    for index, (joiner, words) in enumerate(condition):
        if not words:
            continue
        texts = [" ".join(_expanded(word, script, splits=False)) for word in words]
        one = _test(texts)
        if index == 0 or result is None:
            result = one if index == 0 or joiner == "\n" else _joined(result, one, joiner)
        else:
            result = _joined(result, one, joiner)
    return result


def _joined(left: bool | None, right: bool | None, joiner: str) -> bool | None:
    decides = joiner == "||"  # True decides an "or", False an "and"
    if decides in (left, right):
        return decides
    return None if None in (left, right) else right


def _test(words: Sequence[str]) -> bool | None:
    """Evaluate the words of `[ ... ]`; None = it is not known."""
    if words[:1] == ["!"]:
        other = _test(words[1:])
        return None if other is None else not other
    if len(words) < 3 or words[0] not in ("[", "[["):
        return None
    inner = list(words[1:-1])
    negated = inner[:1] == ["!"]
    inner = inner[negated:]
    result: bool | None = None
    if len(inner) == 2 and inner[0] in ("-z", "-n") and _PARAMETER.fullmatch(inner[1]):
        inner[1] = ""  # nothing sets it
    if any("$" in word or "`" in word for word in inner):
        return None
    if len(inner) <= 2 and inner[:1] in (["-z"], ["-n"]):
        result = (len(inner) < 2 or not inner[1]) == (inner[0] == "-z")
    elif len(inner) == 3:
        left, how, right = inner
        if how in ("=", "==", "!="):
            result = (left == right) == (how != "!=")
        elif how in _COMPARED and re.fullmatch("-?[0-9]{1,18}", left + "0"):
            number = re.fullmatch("-?[0-9]{1,18}", right)
            result = _COMPARED[how](int(left or 0), int(right)) if number else None
    return None if result is None else result != negated
