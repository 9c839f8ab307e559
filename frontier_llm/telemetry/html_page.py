"""Build the HTML elements of the report and of the planner's page with the macros of page.html.

All functions escape the text that they are given, except where an argument is called HTML.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Any

UNKNOWN = "unknown"
"""Text that is shown in place of a number that is not known."""


@dataclass(frozen=True)
class Tile:
    """A key number of the page, shown in a box of its own."""

    name: str
    value: str
    unit: str = ""
    """Not shown if the value is `UNKNOWN`."""
    note: str = ""
    """Small text below the value."""


@cache
def _macros() -> Any:
    from jinja2 import Environment, PackageLoader  # not needed by most commands

    loader = PackageLoader("frontier_llm.telemetry", "")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("page.html").module


def element(macro: str, *values: Any) -> str:
    """Return the HTML of a macro of page.html, which escapes the values that are plain text."""
    return str(getattr(_macros(), macro)(*values))


def _safe(html: str) -> Any:
    """Mark HTML, which macros insert as it is."""
    from markupsafe import Markup

    return Markup(html)


def tiles(key_numbers: Iterable[Tile]) -> str:
    """Return a grid of tiles as HTML."""
    return element("tiles", key_numbers, UNKNOWN)


def section(title: str, body: str, explanation: str = "") -> str:
    """Return a section of the page as HTML.

    `body` is HTML. `explanation` is the paragraph below the heading, with names in backticks.
    """
    paragraph = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(explanation))
    return element("section", title, _safe(body), _safe(paragraph))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], last_is_sum: bool = False) -> str:
    """Return a table as HTML; a last row that is a sum is shown in bold."""
    return element("table", head, rows, last_is_sum)


def page(title: str, badge: tuple[str, str], subtitle: str, body: Iterable[str]) -> str:
    """Return the whole document as HTML.

    `badge` is the label beside the title: its colour (`good`, `mild` or `bad`) and its text.
    `body` has sections and other elements as HTML.
    """
    return element("page", title, badge, subtitle, map(_safe, body))
