"""Build the HTML elements of the report and of the planner's page.

All functions escape the text that they are given, except where an argument is called HTML.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root { --ink: #0f172a; --soft: #475569; --faint: #94a3b8; --line: #e2e8f0; --blue: #2563eb; }
* { box-sizing: border-box; }
body { margin: 0; background: #f8fafc; color: var(--ink); line-height: 1.5; font-size: 15px;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0; letter-spacing: -0.02em; }
h2 { font-size: 19px; margin: 0 0 4px; letter-spacing: -0.01em; }
h3 { font-size: 15px; margin: 14px 0 4px; }
p { margin: 4px 0 14px; color: var(--soft); max-width: 78ch; }
header { margin-bottom: 24px; }
header p { margin: 8px 0 0; max-width: none; }
.badge { display: inline-block; font-size: 13px; font-weight: 600; border-radius: 99px;
  padding: 3px 12px; margin-left: 12px; vertical-align: 5px; letter-spacing: 0; }
.good { background: #dcfce7; color: #166534; } .mild { background: #fef3c7; color: #92400e; }
.bad { background: #fee2e2; color: #991b1b; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(240px, 1fr)); gap: 12px; }
.tile { background: white; border: 1px solid var(--line); border-radius: 10px;
  padding: 14px 16px; }
.tile .name { font-size: 13px; color: var(--soft); }
.tile .value { font-size: 25px; font-weight: 650; letter-spacing: -0.02em; line-height: 1.35; }
.tile .unit { font-size: 15px; font-weight: 500; color: var(--soft); letter-spacing: 0; }
.tile .note { font-size: 13px; color: var(--soft); }
section { background: white; border: 1px solid var(--line); border-radius: 10px;
  padding: 22px 24px; margin-top: 20px; }
section > svg { display: block; width: 100%; height: auto; }
svg text { font-family: inherit !important; }
svg.ranks text { font-size: 12px; fill: var(--ink); }
svg.ranks g text { text-anchor: middle; }
svg.ranks .rank, svg.ranks .stage { font-weight: 650; font-size: 13px; }
svg.ranks .small { font-size: 11.5px; } svg.ranks .faint { fill: var(--soft); }
svg.ranks .node { fill: none; stroke: #334155; stroke-width: 2.5; stroke-linecap: round; }
.scroll { overflow: auto; max-height: 560px; }
.scroll th { position: sticky; top: 0; background: white; }
table { border-collapse: collapse; width: 100%; font-size: 14px; margin-top: 8px; }
th { text-align: right; font-weight: 600; color: var(--soft); font-size: 13px; }
td { text-align: right; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
tr.sum td { font-weight: 650; border-bottom: none; }
pre { font: 13px/1.5 ui-monospace, "SF Mono", Consolas, "DejaVu Sans Mono", monospace; margin: 0;
  white-space: pre-wrap; overflow-wrap: anywhere; }
pre.sample { background: #f8fafc; border: 1px solid var(--line); border-radius: 8px;
  border-left: 4px solid var(--blue); padding: 12px 16px; margin-top: 12px; tab-size: 4; }
pre mark { background: #dbeafe; color: #1e40af; font-weight: 650; border-radius: 3px; }
summary { cursor: pointer; font-size: 19px; font-weight: 700; }
details pre { margin-top: 14px; }
code { font-family: ui-monospace, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px;
  overflow-wrap: anywhere; }
footer { color: var(--soft); font-size: 13px; margin-top: 24px; }
@media print { body { background: white; } .scroll { max-height: none; }
  section, .tile { break-inside: avoid; } }
"""
"""Style sheet of every page."""
UNKNOWN = "unknown"
"""Text that is shown in place of a number that is not known."""


@dataclass(frozen=True)
class Tile:
    """A key number of the page, shown in a box of its own."""

    name: str
    value: str
    unit: str = ""
    """Unit of the value; not shown if the value is `UNKNOWN`."""
    note: str = ""
    """Small text below the value."""

    def html(self) -> str:
        """Return the tile as HTML."""
        unit = "" if self.value == UNKNOWN else self.unit
        return (
            f'<div class="tile"><div class="name">{escape(self.name)}</div>'
            f'<div class="value">{escape(self.value)} <span class="unit">{escape(unit)}</span>'
            "</div>"
            f'<div class="note">{escape(self.note)}</div></div>'
        )


def tiles(key_numbers: Iterable[Tile]) -> str:
    """Return a grid of tiles as HTML."""
    return f'<div class="tiles">{"".join(tile.html() for tile in key_numbers)}</div>'


def section(title: str, body: str, explanation: str = "") -> str:
    """Return a section of the page as HTML.

    Args:
        title: heading, plain text.
        body: content, HTML.
        explanation: paragraph below the heading, plain text.
    """
    paragraph = f"<p>{escape(explanation)}</p>" if explanation else ""
    return f"<section><h2>{escape(title)}</h2>{paragraph}{body}</section>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], last_is_sum: bool = False) -> str:
    """Return a table as HTML.

    Args:
        head: titles of the columns, plain text.
        rows: cells of each row, plain text.
        last_is_sum: whether the last row is a sum and is shown in bold.
    """
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = [f"<tr>{line}</tr>" for line in lines]
    if last_is_sum and lines:
        body[-1] = f'<tr class="sum">{lines[-1]}</tr>'
    titles = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return (
        f'<div class="scroll"><table><thead><tr>{titles}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def sample(prompt: str, text: str) -> str:
    """Return a prompt and the text with which a model continued it, as HTML."""
    return f'<pre class="sample"><mark>{escape(prompt)}</mark>{escape(text)}</pre>'


def folded(title: str, caption: str, text: str) -> str:
    """Return a section as HTML that shows only its title until a reader opens it.

    Args:
        title: heading, plain text.
        caption: line above the text, plain text.
        text: long text with line breaks, plain text.
    """
    return (
        f"<section><details><summary>{escape(title)}</summary>"
        f"<p><code>{escape(caption)}</code></p><pre>{escape(text)}</pre></details></section>"
    )


def footer(text: str) -> str:
    """Return the footer of the page as HTML."""
    return f"<footer>{escape(text)}</footer>"


def page(title: str, badge: tuple[str, str], subtitle: str, body: Iterable[str]) -> str:
    """Return the whole document as HTML.

    Args:
        title: title of the document, plain text.
        badge: label beside the title: its colour (`good`, `mild` or `bad`) and its plain text.
        subtitle: line below the title, plain text.
        body: sections and other elements, HTML.
    """
    colour, badge_text = badge
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f'<header><h1>{escape(title)}<span class="badge {colour}">{escape(badge_text)}</span></h1>'
        f"<p>{escape(subtitle)}</p></header>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )
