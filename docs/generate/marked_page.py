"""Replace the generated blocks of a page, between `<!-- NAME -->` and `<!-- end of NAME -->`.

The text around these markers is written by hand and is not changed. All generators of this folder
use this module.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from frontier_llm.cli.options import tool_parser


def filled(text: str, tables: Mapping[str, Iterable[str]]) -> str:
    """Return a page with new blocks between their markers.

    Args:
        text: the page.
        tables: the lines of each block, by the name in its markers.

    Raises:
        ValueError: a marker is missing.
    """
    for name, lines in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(f"the markers of {name} are missing")
        text = "".join([before, begin, *(f"{line}\n" for line in lines), end, after])
    return text


def keep_current(
    doc: str | None,
    tool: str,
    arguments: Sequence[str] | None,
    make: Callable[[], Mapping[Path, str]],
) -> int:
    """Run a generator: write files with `--write`, or else print which are out of date.

    Args:
        doc: docstring of the generator, which is its help text.
        tool: name of the generator's module.
        arguments: command line of the generator; None: the command line of this process.
        make: returns the content of each file; called after the command line is parsed.

    Returns:
        The exit code: 1 if a file is out of date and was not written.
    """
    parser = tool_parser(doc)
    parser.add_argument("--write", action="store_true", help="write the files")
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
