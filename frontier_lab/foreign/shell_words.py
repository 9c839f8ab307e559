"""Read the words of the commands of a bash script, without running it.

Variables, arrays, `+=`, line continuations, integer arithmetic and default values (`${X:-1}`) are
followed, and so are `if`, `case`, `while`, `&&` and `||` on known values, loops over known values,
functions, and scripts that are sourced or started. A variable that nothing sets counts as empty
where a script asks for it (`[ -z "$X" ]`). Else what only the shell that runs the script knows,
such as `$1` or `$(hostname)`, stays in a word as it is written. A variable that is set by a command
which may not run is not known from there on, unless the command only adds options to it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import dropwhile, takewhile
from pathlib import Path

from frontier_lab.foreign.shell_conditions import UNKNOWN, calculated, is_open, tested
from frontier_lab.foreign.shell_script import Script
from frontier_lab.foreign.shell_syntax import BRACES, INNER, QUOTES, Command, parse, too_long

_PIECE = re.compile(
    rf"""'(?P<literal>[^']*)'|"(?P<quoted>{QUOTES}|(?:\\.|[^"\\])*)"|\\(?P<escaped>\n|.)
    |(?P<variable>\$\(\({INNER}\)\)|\$\({INNER}\)|{BRACES}|\$(?:\w+|[@*\#])|`[^`\n]*`)
    |(?P<plain>[^'"\\$`]+|.)""",
    re.VERBOSE | re.DOTALL,
)
_WORDS = re.compile(rf"(?:\$\({INNER}\)|\S)+")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(
    r"\$\{?(\#?)(\w+|[@*\#])(?:\[([@*]|\d{1,6})\])?(?:@Q|(:?[-=?+])(.*))?\}?", re.DOTALL
)
_EVERY = re.compile(r"\$\{\w+\[@\]\}|\$@|\$\{@\}")
_DECLARES = {"export", "local", "declare", "readonly", "typeset"}
_SKIPPED = {"then", "do", "else", "fi", "esac", "done", "{", "}", "!", "time", "exec", "eval"}
_TESTS = {"[", "[[", "test"}
_STARTS = {"source", ".", "bash", "sh", "sbatch"}
_SUCCEEDS = _STARTS | set(" : cd echo mkdir module printf set shift true ulimit unset".split(" "))
"""Commands that are taken to succeed."""
MOST_WORDS, LONGEST, DEEPEST, MOST_CALLS, MOST_ROUNDS = 50_000, 1_000_000, 20, 500, 100
"""Limits of the words of a variable, of its characters, of variables and calls within each other,
of all calls, and of the rounds of a loop."""
EXIT = "exit (what follows is read all the same)"


def read_script(
    text: str,
    variables: dict[str, list[str]] | None = None,
    depth: int = 0,
    folder: Path | None = None,
    steps: list[int] | None = None,
) -> Script:
    """Read a script; `variables` are known from outside, sourced files are in `folder`.

    Raises a ConfigError for one with too many commands, or too many within each other.
    """
    script = Script(variables=variables or {}, folder=folder, steps=steps or [0])
    try:
        _run(parse(text), script, depth)
        if not any(word.startswith("--") for words in script.commands for word in words):
            for name in [name for name in script.functions if name not in script.calls]:
                _run(script.functions[name], script, depth)  # a file of functions
    except RecursionError:
        raise too_long() from None
    return script


def _run(commands: Sequence[Command], script: Script, depth: int) -> bool | None:
    """Read commands; return whether the last one succeeds, None if that is not known."""
    result: bool | None = True
    before = ""
    for command in commands:
        if script.returned or script.jump:
            break
        script.count(1)
        decides = {"&&": False, "||": True}.get(command.joiner)
        if decides is None and command.joiner != ")":
            before = ""
        if decides is not None and result is decides:
            continue
        if decides is not None and result is None and not _starts(command, before):
            _leave_out([command], f"{before} {command.joiner}", script, depth)
        elif command.words or command.kind:
            result = _run_one(command, script, depth)
        before = f"{before} {command.text()}".strip()
    return result


def _starts(command: Command, before: str) -> bool:
    """Return whether a command is taken to run after another one of unknown success."""
    sets = command.kind or any(map(_ASSIGNMENT.fullmatch, command.words))
    asks = sets or before.startswith(("[", "((", "test ", "!"))
    return command.joiner == "&&" and not (asks and not _ASSIGNMENT.match(before))


def _run_one(command: Command, script: Script, depth: int) -> bool | None:
    kind, words = command.kind, command.words
    if kind == "function":
        script.functions[words[0]] = command.branches[0][1]
        return True
    if kind == "{":
        return _run(command.branches[0][1], script, depth)
    if kind:
        ways = {"if": _choose, "case": _choose_case, "for": _repeat_for}
        return ways.get(kind, _repeat_while)(command, script, depth)
    if words[0] == "!":
        other = _run_one(replace(command, words=words[1:] or ["true"]), script, depth)
        return None if other is None else not other
    if words[0].startswith("((") or words[0] == "let":
        texts = [words[0][2:-2]] if words[0] != "let" else [_joined(w, script) for w in words[1:]]
        numbers = [_arithmetic(text, script, depth) for text in texts]
        return None if None in numbers else bool(numbers and numbers[-1])
    if words[0] in _TESTS:
        return tested([_joined(word, script) for word in words])
    return _run_simple(list(dropwhile(_SKIPPED.__contains__, words)), script, depth)


def _choose(command: Command, script: Script, depth: int) -> bool | None:
    """Read the branch of an `if` that holds; leave out all that may hold."""
    for at, (condition, body) in enumerate(command.branches):
        holds = condition is None or _run(condition, script, depth)
        if holds:
            return _run(body, script, depth)
        if holds is None:
            text = " ".join(each.text() for each in condition or ())
            rest = [each for _, commands in command.branches[at:] for each in commands]
            _leave_out(rest, f"if {text}", script, depth)
            return None
    return True


def _choose_case(command: Command, script: Script, depth: int) -> bool | None:
    """Read the branch of a `case` whose pattern matches."""
    value = _joined(command.words[1], script)
    if is_open(value):
        rest = [each for _, commands in command.branches for each in commands]
        _leave_out(rest, f"case {command.words[1]}", script, depth)
        return None
    for patterns, (_, body) in zip(command.patterns, command.branches, strict=True):
        if any(fnmatchcase(value, _joined(pattern, script)) for pattern in patterns):
            return _run(body, script, depth)
    return True


def _repeat_for(command: Command, script: Script, depth: int) -> None:
    """Read the body of `for X in ...` for each value."""
    name, *rest = command.words or [""]
    body, text = command.branches[0][1], f"for {' '.join(command.words)[:60]}"
    if rest[:1] != ["in"]:  # an arithmetic loop
        _leave_out(body, text, script, depth)
        return
    values = [part for word in rest[1:] for part in _expanded(word, script)]
    if values == ["$@"]:
        script.undecided.append(f"{text} (planned without arguments)")
        return
    if len(values) > 1 and rest[1] not in ('"$@"', "$@"):
        script.undecided.append(f"{text} (planned with its last value)")
    for value in values[-MOST_ROUNDS:]:
        script.variables[name] = [value]
        if _run_round(body, script, depth):
            break
    if any(is_open(value) or "{" in value for value in values):  # it has any number of rounds
        _leave_out(body, text, script, depth)


def _repeat_while(command: Command, script: Script, depth: int) -> None:
    """Read the body of a `while` or `until` as often as its condition holds."""
    (condition, body), text = command.branches[0], command.text()
    if "$#" in text and "#" not in script.variables:
        script.undecided.append(f"{text} (planned without arguments)")
        return
    is_endless = bool({"true", ":"} & set(text.split()))
    for _ in range(1 if is_endless else MOST_ROUNDS):
        holds = _run(condition or [], script, depth)
        if holds is None:
            _leave_out(body, text, script, depth)
        if holds is None or holds == (command.kind == "until"):
            return
        if _run_round(body, script, depth):
            return
    if is_endless:  # how often it runs is not known
        words = (word for words in _inside(body, script, set()) for word in words)
        script.forget(found[1] for found in map(_ASSIGNMENT.fullmatch, words) if found)


def _run_round(body: Sequence[Command], script: Script, depth: int) -> bool:
    """Read the body of a loop once, which counts as a call; return whether the loop is left."""
    script.calls.append("")
    if len(script.calls) < MOST_CALLS:
        _run(body, script, depth)
    jump, script.jump = script.jump, ""
    return jump == "break"


def _leave_out(commands: Sequence[Command], why: str, script: Script, depth: int) -> None:
    """Note what may not be run, if it sets or gives something; what it sets is not known then."""
    why = why[:88].strip()
    for words in list(_inside(commands, script, set())):
        rest = list(dropwhile(lambda word: word in _DECLARES or word[:1] == "-", words))
        sets = list(takewhile(_ASSIGNMENT.fullmatch, rest))
        has_options = any("--" in word for word in words) and words[0] not in _TESTS
        if (sets or has_options) and words[0] != "echo" and why not in script.undecided:
            script.undecided.append(why)
        for name, adds, value in (_ASSIGNMENT.findall(word)[0] for word in sets):
            adds = adds or re.search(rf"\$\{{?{name}\b", " ".join(words))
            if not (adds and has_options) and script.variables.get(name) != [
                _joined(value, script)
            ]:
                script.forget([name])
        if words[0] in ("source", "."):
            script.unread.append(" ".join(words[1:2]))
        elif has_options and not sets and depth < DEEPEST:
            inner = replace(script, commands=[], variables=dict(script.variables))
            _run_simple(words, inner, depth + 1)
            script.left_out += inner.commands


def _inside(commands: Sequence[Command], script: Script, called: set[str]) -> Iterator[list[str]]:
    """Yield the words of all simple commands within commands, and in the functions they call."""
    for command in commands:
        for condition, body in command.branches:
            yield from _inside([*(condition or ()), *body], script, called)
        words = list(dropwhile(_SKIPPED.__contains__, command.words))
        if command.kind or not words:
            continue
        yield words
        if words[0] in script.functions and words[0] not in called:
            called.add(words[0])
            yield from _inside(script.functions[words[0]], script, called)


def _run_simple(words: Sequence[str], script: Script, depth: int) -> bool | None:
    """Assign variables, or append a command with expanded words; return whether it succeeds."""
    rest = list(words)
    if rest[:2] == ["declare", "-p"]:
        return rest[-1] in script.variables
    if rest and rest[0] in _DECLARES:
        rest = _assign(dropwhile(lambda word: word.startswith("-"), rest[1:]), script)
        _declare(rest, script)
        return True
    rest = _assign(rest, script)
    if not rest:
        return None if any(is_open(word) and "(" in word for word in words) else True
    command: list[str] = []
    for part in (part for word in rest for part in _expanded(word, script)):
        script.count(1)
        nested = Script()
        if re.search(r"\s--\w", part) and depth < DEEPEST:
            nested = read_script(part, dict(script.variables), depth + 1, steps=script.steps)
        command += [each for words in nested.commands for each in words] or [part]
    first, others = (command[0], command[1:]) if command else ("", [])
    if first == "shift" and "@" in script.variables:
        count = int(others[0][:3]) if others[:1] and others[0].isdecimal() else 1
        _set_arguments(script.variables["@"][count:], script)
    elif first in script.functions and depth < DEEPEST:
        return _call(command, script, depth)
    elif first and not _run_builtin(first, others, script, depth):
        script.commands.append(command[:MOST_WORDS])
    return True if first in _SUCCEEDS else False if first == "false" else None


def _run_builtin(first: str, words: list[str], script: Script, depth: int) -> bool:
    """Follow a command of the shell, if it is one that counts here; return whether it is."""
    indexed = re.match(r"([A-Za-z_]\w*)\[[^]]*\]\+?=", first)
    if first in _STARTS:
        return _start(first, words, script, depth)
    if first == "return":
        script.returned = depth > 0
    elif first in ("break", "continue"):
        script.jump = first
    elif first == "exit":
        script.undecided += [] if EXIT in script.undecided else [EXIT]
    elif first == "unset":
        script.variables = {k: v for k, v in script.variables.items() if k not in words}
    elif first == "read" or (first == "printf" and words[:1] == ["-v"]):
        script.forget(name for name in words if name.isidentifier())
    elif indexed:
        script.forget([indexed[1]])
    else:
        return False
    return True


def _declare(words: Sequence[str], script: Script) -> None:
    """Follow `export "$K"="$V"`, by which scripts set what their arguments `K=V` name."""
    for word in words:
        found = [_joined(word, script)] if "=" in word else []
        if found and not _ASSIGNMENT.fullmatch(found[0]):
            why = f"export {word} (set to the arguments NAME=VALUE)"
            script.undecided += [] if why in script.undecided else [why]
            found = script.variables.get("@", [])
        for each in filter(None, map(_ASSIGNMENT.fullmatch, found)):
            script.variables[each[1]] = [each[3]]


def _call(words: Sequence[str], script: Script, depth: int) -> bool | None:
    """Read the body of a function with its arguments."""
    script.calls.append(words[0])
    if len(script.calls) > MOST_CALLS:
        return None
    body = script.functions[words[0]]
    declared = [inner for inner in _inside(body, script, set(script.functions))]
    names = {each.partition("=")[0] for inner in declared if inner[0] == "local" for each in inner}
    outer = {name: script.variables[name] for name in names & script.variables.keys()}
    outer |= _set_arguments(words[1:], script)
    result = _run(body, script, depth + 1)
    script.returned = False
    _set_arguments([], script)
    for name in ("@", "*", "#", *names):
        script.variables.pop(name, None)
    script.variables |= outer
    return result


def _printed(words: Sequence[str], script: Script, depth: int) -> list[str]:
    """Return what a function prints by its last `echo`."""
    inner = replace(script, commands=[], variables=dict(script.variables))
    _call(words, inner, depth + 1)
    printed = [command[1:] for command in inner.commands if command[0] == "echo"]
    return [" ".join(printed[-1])] if printed else []


def _set_arguments(words: Sequence[str], script: Script) -> dict[str, list[str]]:
    """Set the arguments of a script or function; return those it had."""
    names = [name for name in script.variables if not name.isidentifier()]
    old = {name: script.variables.pop(name) for name in names}
    script.variables |= {str(index): [word] for index, word in enumerate(words, 1)}
    script.variables |= {"@": list(words), "*": list(words), "#": [str(len(words))]}
    return old


def _start(how: str, words: Sequence[str], script: Script, depth: int) -> bool:
    """Read a script that is sourced or started, if it lies below the folder of this one."""
    words = list(dropwhile(lambda word: word.startswith("-"), words))
    is_sourced = how in ("source", ".")
    parts = words[0].split("/") if words and "-c" not in words else []
    script.calls += words[:1]
    if script.folder and depth < DEEPEST and len(script.calls) < MOST_CALLS:
        for at in range(len(parts)):
            file = script.folder.joinpath(*filter(None, parts[at:]))
            try:
                inside = file.is_file() and ".." not in parts[at:]
                text = file.read_text() if inside and file.stat().st_size < LONGEST else ""
            except (OSError, ValueError):
                text = ""
            if text and is_sourced:
                _run(parse(text), script, depth + 1)
                script.returned = False
            elif text:
                inner = replace(script, variables=dict(script.variables))
                _set_arguments(words[1:], inner)
                _run(parse(text), inner, depth + 1)
            if text:
                return True
    script.unread += words[:1] if is_sourced else []
    return is_sourced


def _assign(words: Iterable[str], script: Script) -> list[str]:
    """Assign the variables at the beginning of a command; return its other words."""
    rest = list(words)
    while rest and (found := _ASSIGNMENT.fullmatch(rest[0])):
        name, adds, value = found.groups()
        if rest[1:2] == ["("]:
            end = rest.index(")") if ")" in rest else len(rest)
            values = [part for word in rest[2:end] for part in _expanded(word, script)]
            script.count(len(values))
            old = script.variables.get(name, []) if adds else []
            script.variables[name] = [*old, *values][:MOST_WORDS]
            rest = rest[end + 1 :]
            continue
        text = _joined(value, script)
        if adds:
            text = " ".join(script.variables.get(name, [])) + text
        script.variables[name] = [text[:LONGEST]]
        rest = rest[1:]
    return rest


def _joined(word: str, script: Script) -> str:
    """Return what a raw word stands for, as one word."""
    return " ".join(_expanded(word, script, splits=False))


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
            if _EVERY.fullmatch(piece["quoted"]):
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
        number = _calculated(reference[3:-2], script, depth + 1)
        return [reference if number is None else str(number)]
    inside = parse(reference[2:-1]) if script.functions and reference.startswith("$(") else []
    if len(inside) == 1 and inside[0].words and inside[0].words[0] in script.functions:
        words = [_expanded(word, script, depth=depth + 1) for word in inside[0].words]
        return _printed([part for parts in words for part in parts], script, depth)
    found = _PARAMETER.fullmatch(reference)
    values = None if found is None else _parameter(found, script, depth)
    return [reference] if values is None else values


def _parameter(found: re.Match[str], script: Script, depth: int) -> list[str] | None:
    """Return the values of a parameter; None = they are not known."""
    count, name, index, how, other = found.groups()
    known = script.variables.get(name)
    is_whole = not count and (index is None or index in "@*")
    if known is not None and any(value.endswith(UNKNOWN) for value in known):
        return known if is_whole else None
    if not is_whole:
        return None if known is None else _part(known, count, index)
    is_set = known is not None and (any(known) or ":" not in (how or ""))
    if known is not None and "+" not in (how or "") and (is_set or how is None):
        return known
    if how is None or "?" in how or ("+" in how and not is_set):
        return [] if "+" in (how or "") else None
    values = _expanded((other or "").removesuffix("}"), script, depth=depth + 1)
    if "=" in how:
        script.variables[name] = values
    return values


def _part(known: list[str], count: str, index: str | None) -> list[str]:
    """Return a length, or one value of an array."""
    if count:
        return [str(len(known if index in ("@", "*") else " ".join(known)))]
    return known[int(index or 0) : int(index or 0) + 1]


def _arithmetic(text: str, script: Script, depth: int) -> int | None:
    """Calculate an expression that may assign a variable; None = it is not known."""
    found = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(\+\+|--|[-+*/%]?=(?!=)(.*))", text, re.DOTALL)
    if found is None:
        names = re.findall(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))", text)
        script.forget(names)
        return None if names else _calculated(text, script, depth)
    name, how, other = found.groups()
    sign, operand = how[0], "1" if other is None else f"({other})"
    number = _calculated(operand if sign == "=" else f"{name} {sign} {operand}", script, depth)
    script.variables[name] = [f"${{{name}{UNKNOWN}" if number is None else str(number)]
    return number


def _calculated(text: str, script: Script, depth: int) -> int | None:
    """Calculate an expression of integers and variables; None = it is not known."""
    text = _expanded_quotes(text, script, depth)[0]
    return calculated(text, lambda name: " ".join(script.variables.get(name, [])))
