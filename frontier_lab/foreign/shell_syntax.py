"""Split the text of a bash script into commands, without running it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from frontier_llm.errors import ConfigError

# lengths are bounded, and so is the number of brackets (MOST_OPENS): the search for ends is slow
INNER = r"(?:[^()]|\((?:[^()]|\([^()]{0,400}\)){0,400}\)){0,400}"
BRACES = r"\$\{(?:[^{}\n]|\$\{[^{}\n]{0,200}\}){0,200}\}"
QUOTES = rf"(?:\\.|\$\({INNER}\)|[^\"\\$]|\$(?!\())*"
"""What double quotes may contain, with quotes within `$(...)`."""
_TOKEN = re.compile(
    rf"""(?P<space>(?:[ \t\r]|\\\r?\n)+)
    |(?P<comment>(?<![^\s;&|()])\#[^\n]*)
    |(?P<heredoc><<-?[ \t]*(?P<quote>['"]?)(?P<end>\w+)(?P=quote))
    |(?P<arithmetic>\(\({INNER}\)\))
    |(?P<operator>\n|;;|;|&&|\|\||\||&|\(|\)|[0-9]?[<>]+&?)
    |(?P<word>(?:\\.|'[^']*'|"{QUOTES}"|"(?:\\.|[^"\\])*"|\$\({INNER}\)|{BRACES}|`[^`\n]*`
      |[^\s;&|()<>'"\\`])+)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_SEPARATORS = {"\n", ";", "&&", "||", "|", "&", ";;", "(", ")"}
_KEYWORDS = {"if", "then", "elif", "else", "fi", "while", "until", "do", "done", "{", "}"}
_BEFORE = {*_KEYWORDS, "!", "for"}
"""Words after which a test may begin."""
_OPENS = re.compile(r"\(\(|\$[({]|<<")
MOST_NESTED, MOST_OPENS = 50, 3_000
"""Limits of the commands within each other that are told apart, and of all brackets and heredocs
that may need a search for their end."""

Words = tuple[str, list[str]]
"""The operator before a command, and its raw words."""


@dataclass
class Command:
    """A command with its raw words, or `if`, `case`, a loop, a group, or a function."""

    joiner: str
    """The operator before it."""
    words: list[str]
    kind: str = ""
    """Of what has other commands inside: if, case, for, while, until, { or function."""
    branches: list[tuple[list["Command"] | None, list["Command"]]] = field(default_factory=list)
    """Conditions and what is run below them; None: there is no condition."""
    patterns: list[list[str]] = field(default_factory=list)
    """Of the branches of a `case`."""

    def text(self) -> str:
        """Return the command as one line, without what is inside its branches."""
        words = [] if self.joiner in ("\n", ";", "") else [self.joiner]
        conditions = self.branches[:1] if self.kind in ("if", "while", "until") else []
        inner = [each.text() for condition, _ in conditions for each in condition or ()]
        return " ".join([*words, *([self.kind] if conditions else []), *self.words, *inner])


def too_long() -> ConfigError:
    """Return the error for a script that cannot be followed to its end."""
    return ConfigError(
        "--from",
        "a script with too many commands, or too many within each other",
        "a script that starts a program",
        "name a file with the program's command alone",
    )


def parse(text: str) -> list[Command]:
    """Return the commands of a script."""
    if len(_OPENS.findall(text)) > MOST_OPENS:
        raise too_long()
    split: list[Words] = []
    for joiner, words in _simple_commands(text):
        at = 0
        while at < len(words) and words[at] in _KEYWORDS:
            split.append((joiner, [words[at]]))
            joiner, at = "", at + 1
        if at < len(words) or joiner in ("(", ")", ";;", "&&", "||"):
            split.append((joiner, words[at:]))
    return _Parser(split).block()


class _Parser:
    """Reads commands one after the other; a keyword is a command of its own."""

    def __init__(self, commands: list[Words]) -> None:
        self._commands, self._place, self._depth = commands, 0, 0

    def block(self, *ends: str) -> list[Command]:
        """Read commands up to a keyword that ends them."""
        found: list[Command] = []
        self._depth += 1
        while self._place < len(self._commands):
            joiner, words = self._commands[self._place]
            if (";;" in ends and joiner == ";;") or (words and words[0] in ends):
                break
            self._place += 1
            found.append(self._command(joiner, words))
        self._depth -= 1
        return found

    def _take(self) -> str:
        """Go past a keyword, and return it."""
        self._place += 1
        words = self._commands[self._place - 1][1] if self._place <= len(self._commands) else []
        return words[0] if words else ""

    def _command(self, joiner: str, words: list[str]) -> Command:
        first = words[0] if words else ""
        command = Command(joiner, words)
        if self._depth > MOST_NESTED:
            return command
        named = first == "function" and len(words) > 1
        after = self._commands[self._place : self._place + 2] if len(words) == 1 or named else []
        operators = [each for each, _ in after]
        if named or (len(words) == 1 and operators == ["(", ")"]):
            self._place += 0 if named and operators != ["(", ")"] else 1
            self._function(command, words[named])
        elif first == "if":
            command.kind, command.words = first, []
            word = "elif"
            while word == "elif":
                condition = self.block("then")
                self._take()
                command.branches.append((condition, self.block("elif", "else", "fi")))
                word = self._take()
            if word == "else":
                command.branches.append((None, self.block("fi")))
                self._take()
        elif first in ("while", "until", "for"):
            command.kind, command.words = first, words[1:]
            condition = self.block("do")
            self._take()
            command.branches = [(condition, self.block("done"))]
            self._take()
        elif first == "{":
            command.kind, command.words = first, []
            command.branches = [(None, self.block("}"))]
            self._take()
        elif first == "case" and words[2:3] == ["in"]:
            self._case(command)
        return command

    def _function(self, command: Command, name: str) -> None:
        """Read the body of a function, from its opening brace on."""
        braces = command.words[2:3] == ["{"]
        after = command.words[3:] if braces else []
        while not braces and self._place < len(self._commands):
            words = self._commands[self._place][1]
            if words[:1] not in ([], ["{"]):
                return
            self._place += 1
            braces = bool(words)
        command.kind, command.words = "function", [name]
        body = [Command("\n", after)] if after else []
        command.branches = [(None, body + self.block("}"))]
        self._take()

    def _case(self, command: Command) -> None:
        """Read the branches of a `case`: patterns up to `)`, commands up to `;;`."""
        patterns = command.words[3:]
        command.kind, command.words = "case", command.words[:2]
        while self._place < len(self._commands):
            joiner, words = self._commands[self._place]
            if joiner == ")":
                self._commands[self._place] = ("\n", words)
                command.patterns.append(patterns)
                command.branches.append((None, self.block(";;", "esac")))
                patterns = []
                continue
            self._place += 1
            if words[:1] == ["esac"]:
                return
            patterns = patterns + words


def _simple_commands(text: str) -> Iterator[Words]:
    """Yield the raw words of each command, and the operator before it; arrays are one word."""
    joiner, words, place = "\n", list[str](), 0
    array = redirects = inside = False
    opens = True
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
        if kind == "arithmetic" and (array or (words and words[-1] not in _BEFORE)):
            token, place = "(", found.start() + 1  # two groups, or an array
            kind = "operator"
        if kind != "operator" or (inside and token != "\n"):
            if kind not in ("space", "comment") and not redirects:
                words.append(token)
                inside = token != "]]" and (inside or (opens and token == "[["))
                opens = opens and token in _BEFORE
            redirects = redirects and kind == "space"
        elif token == "(" and words and words[-1].endswith("=") and text[found.start() - 1] == "=":
            array = True
            words.append(token)
        elif array:
            array = token != ")"
            words += [token] if token == ")" else []
        elif token in _SEPARATORS:
            if words or token != "\n" or joiner in ("(", ")", ";;"):
                yield joiner, words
                joiner, words, opens, inside = token, [], True, False
        else:
            redirects = True  # the next word is a file
    yield joiner, words
