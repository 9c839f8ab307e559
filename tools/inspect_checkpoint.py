"""Look into a checkpoint: `python tools/inspect_checkpoint.py PATH [--verify | --diff OTHER]`.

PATH is a checkpoint, or a folder of them, or a run.dir: of these the newest is taken. Without an
option prints what is stored. `--verify` reads everything and compares all digests. `--diff`
compares the values with those of another checkpoint, whatever the layouts they were written from.
Exit code 1: damage, or a difference, was found.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path

from rich.box import HORIZONTALS
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from frontier_llm.checkpoint.manifest import ELEMENT_BYTES, STATES, Tensor
from frontier_llm.checkpoint.reader import FileReader
from frontier_llm.checkpoint.restore import read_tensor
from frontier_llm.checkpoint.scan import Checkpoint, newest
from frontier_llm.errors import FrontierError
from frontier_llm.units import format_bytes, format_count

CHECKPOINTS = "checkpoints"
_LAYER = re.compile(r"\blayers\.\d+\.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is in a checkpoint, and what is wrong with it; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="a checkpoint, a folder of them, or a run.dir")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--verify", action="store_true", help="compare the digests of all files")
    what.add_argument("--diff", type=Path, metavar="OTHER", help="compare the values of two")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        checkpoint = find(options.path)
        console.print(_headline(checkpoint), highlight=False)
        if options.verify:
            return verify(checkpoint, console)
        if options.diff:
            other = find(options.diff)
            console.print(_headline(other), highlight=False)
            return diff(checkpoint, other, console)
        show(checkpoint, console)
    except FrontierError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def find(path: Path) -> Checkpoint:
    """Return the checkpoint that a path means.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if (path / CHECKPOINTS).is_dir():
        path = path / CHECKPOINTS
    found = newest(path)
    return Checkpoint.open(path) if found is None else found


def show(checkpoint: Checkpoint, console: Console) -> None:
    """Print the tensors, layers that are cut alike in one row, and what else was saved."""
    table = Table(box=HORIZONTALS, caption_justify="left")
    table.caption = (
        "boxes: parts of the tensor, one a tensor-parallel rank; runs: into how many pieces data-"
        "parallel ranks cut a box, at most; size: weights and both moments"
    )
    for title in ("tensor", "of these", "shape", "boxes", "runs", "size"):
        table.add_column(title, justify="left" if title in ("tensor", "shape") else "right")
    for (name, *columns), count in _rows(checkpoint).items():
        table.add_row(name, str(count), *columns)
    console.print(table)
    for key, value in checkpoint.manifest.meta.items():
        console.print(f"{key}: {value}", highlight=False, markup=False)


def verify(checkpoint: Checkpoint, console: Console) -> int:
    """Compare all digests; return the exit code."""
    damages = 0
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("verifying", total=checkpoint.manifest.size)
        for name in checkpoint.manifest.files:
            with FileReader(checkpoint, name, verify=True) as reader:
                for size, damage in reader.chunks():
                    progress.advance(bar, size)
                    if damage is not None:
                        damages += 1
                        progress.console.print(str(damage), style="bold red", soft_wrap=True)
    console.print("every byte is what was written" if not damages else f"{damages} chunks damaged")
    return 1 if damages else 0


def diff(one: Checkpoint, other: Checkpoint, console: Console) -> int:
    """Compare all values; return the exit code."""
    ours, theirs = one.manifest.tensors, other.manifest.tensors
    table = Table(box=HORIZONTALS)
    for title in ("tensor", "state", "elements that differ", "largest difference"):
        table.add_column(title, justify="left" if title in ("tensor", "state") else "right")
    for name in sorted(ours.keys() ^ theirs.keys()):
        table.add_row(name, "", "only in the " + ("first" if name in ours else "second"), "")
    common = sorted(ours.keys() & theirs.keys())
    with Progress(console=console, transient=True) as progress:
        for name in progress.track(common, description="comparing"):
            for row in _differences(one, other, name):
                table.add_row(name, *row)
    if not table.row_count:
        console.print(f"equal: all {len(common)} tensors, weights and moments, bit by bit")
        return 0
    console.print(table)
    return 1


def _differences(one: Checkpoint, other: Checkpoint, name: str) -> list[tuple[str, str, str]]:
    """Return (state, how many elements, by how much) of the states that differ."""
    shapes = [c.manifest.tensors[name].shape for c in (one, other)]
    if shapes[0] != shapes[1]:
        return [("", f"shape {list(shapes[0])} and {list(shapes[1])}", "")]
    ours, theirs = read_tensor(one, name), read_tensor(other, name)
    rows = []
    for state in STATES:
        differ = ours[state].view(torch.int32) != theirs[state].view(torch.int32)
        if count := int(differ.sum()):
            largest = float((ours[state] - theirs[state]).abs().max())
            rows.append((state, f"{count} of {differ.numel()}", f"{largest:.3g}"))
    return rows


def _rows(checkpoint: Checkpoint) -> dict[tuple[str, ...], int]:
    rows: dict[tuple[str, ...], int] = {}
    for name, tensor in checkpoint.manifest.tensors.items():
        row = (_LAYER.sub("layers.*.", name), *_columns(tensor))
        rows[row] = rows.get(row, 0) + 1
    return rows


def _columns(tensor: Tensor) -> tuple[str, ...]:
    boxes: dict[tuple[int, ...], int] = {}
    for piece in tensor.pieces:
        boxes[piece.start] = boxes.get(piece.start, 0) + 1
    size = prod(tensor.shape) * ELEMENT_BYTES * len(STATES)
    shape = " x ".join(map(str, tensor.shape))
    return shape, str(len(boxes)), str(max(boxes.values())), format_bytes(size)


def _headline(checkpoint: Checkpoint) -> str:
    manifest = checkpoint.manifest
    parameters = sum(prod(tensor.shape) for tensor in manifest.tensors.values())
    return (
        f"{checkpoint.folder}: step {manifest.step}, {format_count(parameters)} parameters, "
        f"{format_bytes(manifest.size)} in {len(manifest.files)} files of {manifest.world} ranks"
    )


if __name__ == "__main__":
    sys.exit(main())
