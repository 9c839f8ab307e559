"""The types of keys that are paths."""

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator


def at_home(text: str) -> str:
    """Return a path with `~` replaced; raise a ValueError if no file can have this path."""
    if not text.strip() or re.search("[\0\ud800-\udfff]", text):  # bytes that are not UTF-8
        raise ValueError("not empty, in UTF-8 (LC_ALL=C.UTF-8), without NUL")
    if not text.startswith("~"):
        return text
    try:
        return str(Path(text).expanduser())
    except RuntimeError:
        raise ValueError("the home directory of a user who exists") from None


def expanded(text: str) -> str:
    """Return a path with `~` and `$VARIABLE` replaced; raise a ValueError if this is impossible."""
    path = os.path.expandvars(text)
    if missing := re.search(r"\$(\{[A-Za-z_]\w*\}|[A-Za-z_]\w*)", path):
        raise ValueError(f"variables that are set, which {missing[0]} is not")
    return at_home(path)


def on_this_node(path: str) -> Path:
    """Return a `NodePathName` with its variables replaced, among them $UID, which no shell exports.

    Variables that are not set stay as they are.
    """
    text = re.sub(r"\$(UID\b|\{UID\})", str(os.getuid()), path)
    return Path(os.path.expandvars(text)).absolute()


PathName = Annotated[str, AfterValidator(expanded)]
"""A path that is the same on all nodes; a relative one begins where the program was started."""
NodePathName = Annotated[str, AfterValidator(at_home)]
"""A path on each node. Its variables are replaced there, because they may differ."""
