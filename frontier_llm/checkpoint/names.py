"""What folders and files of checkpoints are called. Needs no torch."""

import re

FOLDER = "checkpoints"
"""In a run.dir: where its checkpoints lie."""
MANIFEST = "manifest.json"
COMMITTED = ("", ".replaced")
"""Of what `parse_folder` says: these are checkpoints."""
_FOLDER = re.compile(r"step_(\d{8,})((?:\.[a-z]+)*)")


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank:05d}.safetensors"


def node_file(first_rank: int) -> str:
    """Return the name of the file that ranks write together, by the first of them."""
    return f"ranks_from_{first_rank:05d}.safetensors"


def step_folder(step: int) -> str:
    """Return the name of a committed checkpoint's folder."""
    return f"step_{step:08d}"


def partial_folder(step: int) -> str:
    """Return the name of the folder while it is written."""
    return f"{step_folder(step)}.partial"


def parse_folder(name: str) -> tuple[int, str] | None:
    """Read a folder's name.

    Returns:
        (step, what it is): "" for a checkpoint, ".partial" while it is written, ".replaced" when
        another one of the same step takes its place, ".deleting", ".void" for one that a run has
        gone back from; None for any other name.
    """
    match = _FOLDER.fullmatch(name)
    return (int(match[1]), match[2] or "") if match else None
