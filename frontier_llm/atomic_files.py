"""Write files that are whole whenever somebody reads them."""

from contextlib import suppress
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a file in UTF-8; if that fails with an OSError, the file before stays, and no part."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
