"""Pages of docs/ with tables that tools make, between `<!-- NAME -->` and `<!-- end of NAME -->`.

What is written by hand around them stays.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tools.options import tool_parser


def filled(text: str, tables: Mapping[str, Iterable[str]]) -> str:
    """Return a page with tables, as lines by name, put between their markers.

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
    """Write files with `--write`, or say which are not what they should be; return the exit code.

    Args:
        doc: of the tool that makes them.
        tool: its file, as the reader calls it.
        arguments: of its command line.
        make: returns the content of each file; called once the command line is understood.
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
        print(f"{path.name} is not current: python {tool} --write", file=sys.stderr)
    return 1 if stale else 0


def _has(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text
