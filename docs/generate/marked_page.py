"""Replace generated tables of a page, between `<!-- NAME -->` and `<!-- end of NAME -->`.

The text around the markers is written by hand and stays.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from frontier_llm.cli.options import tool_parser


def filled(text: str, tables: Mapping[str, Iterable[str]]) -> str:
    """Return a page with new tables between their markers.

    Args:
        text: the page.
        tables: the lines of each table, by the name of its markers.

    Raises:
        ValueError: a marker is missing.
    """
    for name, lines in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, begun, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not (begun and ended):
            raise ValueError(f"the markers of {name} are missing")
        text = "".join([before, begin, *(f"{line}\n" for line in lines), end, after])
    return text


def keep_current(
    doc: str | None,
    tool: str,
    arguments: Sequence[str] | None,
    make: Callable[[], Mapping[Path, str]],
) -> int:
    """Write files with `--write`, or print which are not current; return the exit code.

    Args:
        doc: docstring of the program that makes the files; its help text.
        tool: module of that program.
        arguments: its command line; None: that of this process.
        make: returns the content of each file; called after the command line is parsed.
    """
    parser = tool_parser(doc)
    parser.add_argument("--write", action="store_true", help="write it")
    options = parser.parse_args(arguments)
    wanted = make()
    if options.write:
        for path, text in wanted.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return 0
    stale = [path for path, text in wanted.items() if not _has(path, text)]
    for path in stale:
        print(f"{path.name} is not current: python -m {tool} --write", file=sys.stderr)
    return 1 if stale else 0


def _has(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text
