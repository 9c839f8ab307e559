"""Fit the pages to the site that `mkdocs build` makes; mkdocs calls these functions.

On GitHub pages link to each other and to source files by paths in the repository. In the site the
README is the home page, CONTRIBUTING and CHANGELOG are pages of it, and source files lie outside:
links to them lead to the repository (`repo_url` in mkdocs.yml) or, without one, become plain text.
A link to a file that does not exist is a warning, with which `mkdocs build --strict` fails.
"""

import logging
import os
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages of the site by their files in the repository, outside docs/."""
FENCE = re.compile(r"(^```.*?^```[ ]*$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
MARKER = re.compile(r"^<!-- .* -->$", re.MULTILINE)
_log = logging.getLogger("mkdocs.hooks.site_hooks")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages whose files lie outside docs/."""
    file_type = import_module("mkdocs.structure.files").File  # tests run without mkdocs
    for name, page in PAGES.items():
        if page != "index.md":
            content = (ROOT / name).read_text()
            files.append(file_type.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return a page's text with the links and markers of the site."""
    uri = page.file.src_uri
    source = next((name for name, other in PAGES.items() if other == uri), f"docs/{uri}")
    if uri == "index.md":
        markdown = (ROOT / source).read_text()
    return fit(markdown, source, uri, config.get("repo_url"))


def fit(markdown: str, source: str, uri: str, repo_url: str | None) -> str:
    """Rewrite links outside code blocks, and drop the markers of generated tables.

    Args:
        markdown: text of the page.
        source: its file, relative to the repository.
        uri: its place in the site's sources.
        repo_url: where the repository can be read; None = nowhere.
    """

    def rewrite(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            return match[0]
        path, hash_sign, anchor = target.partition("#")
        place = os.path.normpath(Path(source).parent / path)
        if not (ROOT / place).exists():
            _log.warning("%s: dead link %s", source, target)
            return match[0]
        inside = PAGES.get(place) or (place[5:] if place.startswith("docs/") else None)
        if inside and not inside.startswith("generate/"):
            new = os.path.relpath(inside, Path(uri).parent)
            return f"{image}[{text}]({new}{hash_sign}{anchor})"
        return f"[{text}]({repo_url}/blob/main/{place})" if repo_url else text

    return _outside_code(markdown, lambda text: MARKER.sub("\n", LINK.sub(rewrite, text)))


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else change(part) for part in parts)
