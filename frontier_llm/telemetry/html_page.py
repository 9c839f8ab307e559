"""HTML elements of the report and planner pages. All text from a run is escaped here."""

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


UNKNOWN = "unknown"
"""Shown in place of a figure that is not known."""


@dataclass(frozen=True)
class Tile:
    """A key figure."""

    name: str
    value: str
    unit: str = ""
    note: str = ""

    def html(self) -> str:
        """Return the figure as an element."""
        unit = "" if self.value == UNKNOWN else self.unit
        return (
            f'<div class="tile"><div class="name">{escape(self.name)}</div>'
            f'<div class="value">{escape(self.value)} <span class="unit">{escape(unit)}</span>'
            "</div>"
            f'<div class="note">{escape(self.note)}</div></div>'
        )


def tiles(figures: Iterable[Tile]) -> str:
    """Return key figures as a grid."""
    return f'<div class="tiles">{"".join(tile.html() for tile in figures)}</div>'


def section(title: str, body: str, words: str = "") -> str:
    """Return a section of the page.

    Args:
        title: heading, plain text.
        body: elements, already escaped.
        words: paragraph below the heading, plain text.
    """
    paragraph = f"<p>{escape(words)}</p>" if words else ""
    return f"<section><h2>{escape(title)}</h2>{paragraph}{body}</section>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], last_is_sum: bool = False) -> str:
    """Return rows of plain text as a table."""
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = [f"<tr>{line}</tr>" for line in lines]
    if last_is_sum and lines:
        body[-1] = f'<tr class="sum">{lines[-1]}</tr>'
    heads = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return (
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def sample(prompt: str, text: str) -> str:
    """Return text that a model wrote, with the prompt marked."""
    return f'<pre class="sample"><mark>{escape(prompt)}</mark>{escape(text)}</pre>'


def folded(title: str, words: str, text: str) -> str:
    """Return a long text that is folded until a reader opens it."""
    return (
        f"<section><details><summary>{escape(title)}</summary>"
        f"<p><code>{escape(words)}</code></p><pre>{escape(text)}</pre></details></section>"
    )


def footer(words: str) -> str:
    """Return the footer of the page."""
    return f"<footer>{escape(words)}</footer>"


def counted(number: int, noun: str) -> str:
    """Return `1 rank`, `2 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def page(title: str, badge: tuple[str, str], subtitle: str, body: Iterable[str]) -> str:
    """Return the whole document.

    Args:
        title: title of the document, plain text.
        badge: class (`good`, `mild`, `bad`) and text of the badge beside the title.
        subtitle: plain text below the title.
        body: elements, already escaped.
    """
    kind, words = badge
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f'<header><h1>{escape(title)}<span class="badge {kind}">{escape(words)}</span></h1>'
        f"<p>{escape(subtitle)}</p></header>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )
