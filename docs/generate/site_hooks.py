"""Adapt the pages to the website that `mkdocs build` makes. mkdocs calls these functions.

On GitHub, pages link to each other and to source files by paths in the repository. The website has
the README as its home page, CONTRIBUTING and CHANGELOG as further pages, and no source files. Links
to source files therefore lead to the repository (`repo_url` in mkdocs.yml). Without a repo_url they
become plain text. A link to a file that does not exist causes a warning, and `mkdocs build
--strict` then fails.
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
"""Pages of the website whose files lie outside docs/: the file, and the path of the page."""
FENCE = re.compile(r"(^```.*?^```[ ]*$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
MARKER = re.compile(r"^<!-- .* -->$", re.MULTILINE)
"""Marker of a generated block (blocks.py)."""
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
    """Return the text of a page as the website needs it."""
    uri = page.file.src_uri
    source = next((file for file, page_uri in PAGES.items() if page_uri == uri), f"docs/{uri}")
    if uri == "index.md":
        markdown = (ROOT / source).read_text()
    return fit(markdown, source, uri, config.get("repo_url"))


def fit(markdown: str, source: str, uri: str, repo_url: str | None) -> str:
    """Rewrite links outside code blocks, and remove the markers of generated blocks.

    Args:
        markdown: text of the page.
        source: file of the page, relative to the repository.
        uri: path of the page in the website.
        repo_url: address of the repository; None: it has no address.
    """

    def rewrite(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            return match[0]
        path, hash_sign, anchor = target.partition("#")
        file = os.path.normpath(Path(source).parent / path)
        if not (ROOT / file).exists():
            _log.warning("%s: dead link %s", source, target)
            return match[0]
        in_docs = file.removeprefix("docs/") if file.startswith("docs/") else None
        linked_page = PAGES.get(file) or in_docs
        if linked_page and not linked_page.startswith("generate/"):
            new_path = os.path.relpath(linked_page, Path(uri).parent)
            return f"{image}[{text}]({new_path}{hash_sign}{anchor})"
        return f"[{text}]({repo_url}/blob/main/{file})" if repo_url else text

    return _outside_code(markdown, lambda text: MARKER.sub("\n", LINK.sub(rewrite, text)))


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Apply `change` to the text between code blocks."""
    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else change(part) for part in parts)
