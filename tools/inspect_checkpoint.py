"""Look into a checkpoint.

    python tools/inspect_checkpoint.py PATH                  # what is in it
    python tools/inspect_checkpoint.py PATH --verify         # is every byte what was written?
    python tools/inspect_checkpoint.py PATH --statistics     # mean, deviation, extremes, NaN
    python tools/inspect_checkpoint.py PATH --diff OTHER     # the values of two, of any layouts
    python tools/inspect_checkpoint.py PATH --export FILE    # the weights as plain safetensors

PATH is a checkpoint, or a folder of them, or a run.dir: of these the newest is taken. All but the
first read everything and compare digests on the way. Exit code 1: damage, a difference, or a value
that is not finite was found.
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
from frontier_llm.checkpoint.reader import ReadAhead, chunk_ranges
from frontier_llm.checkpoint.restore import read_tensor
from frontier_llm.checkpoint.scan import Checkpoint, find
from frontier_llm.errors import CheckpointError, FrontierError
from frontier_llm.units import format_bytes, format_count
from tools.checkpoint_export import DTYPES, export
from tools.checkpoint_statistics import spreads
from tools.console import wide_console

_LAYER = re.compile(r"\blayers\.\d+\.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is in a checkpoint, and what is wrong with it; return the exit code."""
    options = parse(arguments)
    console = wide_console()
    try:
        checkpoint = find(options.path)
        console.print(_headline(checkpoint), highlight=False)
        if options.verify:
            return verify(checkpoint, console)
        if options.statistics:
            return show_statistics(checkpoint, console, each=options.each)
        if options.export:
            return write_weights(checkpoint, console, options.export, options.dtype)
        if options.diff:
            other = find(options.diff)
            console.print(_headline(other), highlight=False)
            return diff(checkpoint, other, console)
        show(checkpoint, console)
    except FrontierError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="a checkpoint, a folder of them, or a run.dir")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--verify", action="store_true", help="compare the digests of all files")
    what.add_argument("--statistics", action="store_true", help="of weights and both moments")
    what.add_argument("--diff", type=Path, metavar="OTHER", help="compare the values of two")
    what.add_argument("--export", type=Path, metavar="FILE", help="write the weights to one file")
    parser.add_argument(
        "--each", action="store_true", help="statistics: of each tensor, not of all layers together"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="export: of the weights")
    return parser.parse_args(arguments)


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
    damages, manifest = 0, checkpoint.manifest
    ranges = [chunk for name in manifest.files for chunk in chunk_ranges(checkpoint, name)]
    with (
        Progress(console=console, transient=True) as progress,
        ReadAhead(checkpoint, ranges, verify=True) as reader,
    ):
        bar = progress.add_task("verifying", total=manifest.size)
        for range_, content in reader:
            progress.advance(bar, range_.stop - range_.start)
            if isinstance(content, CheckpointError):
                damages += 1
                progress.console.print(str(content), style="bold red", soft_wrap=True)
    console.print("every byte is what was written" if not damages else f"{damages} chunks damaged")
    return 1 if damages else 0


def show_statistics(checkpoint: Checkpoint, console: Console, *, each: bool) -> int:
    """Print how the values of each state spread; return the exit code.

    Args:
        checkpoint: of any layout.
        console: to print on.
        each: whether the tensors of layers are told apart.
    """
    group = str if each else _group
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("reading", total=checkpoint.manifest.size)
        found = spreads(checkpoint, group, lambda size: progress.advance(bar, size))
    table = Table(box=HORIZONTALS)
    table.add_column("tensor", overflow="fold")
    table.add_column("state")
    for title in ("mean", "deviation", "smallest", "largest", "not finite"):
        table.add_column(title, justify="right")
    for (name, state), spread in found.items():
        numbers = (spread.mean, spread.deviation, spread.smallest, spread.largest)
        bad = f"{spread.not_finite} of {spread.elements}" if spread.not_finite else "0"
        name_once = name if state == STATES[0] else ""
        table.add_row(name_once, state, *(f"{number:.4g}" for number in numbers), bad)
    console.print(table)
    return 1 if any(spread.not_finite for spread in found.values()) else 0


def write_weights(checkpoint: Checkpoint, console: Console, path: Path, dtype: str) -> int:
    """Write all weights to one file; return the exit code."""
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("writing", total=_elements(checkpoint))
        export(checkpoint, path, dtype, lambda count: progress.advance(bar, count))
    size = format_bytes(path.stat().st_size)
    count = len(checkpoint.manifest.tensors)
    console.print(f"{path}: {count} tensors, {dtype}, {size}", highlight=False)
    return 0


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
        row = (_group(name), *_columns(tensor))
        rows[row] = rows.get(row, 0) + 1
    return rows


def _group(name: str) -> str:
    """Name the tensors together that layers have at the same place."""
    return _LAYER.sub("layers.*.", name)


def _elements(checkpoint: Checkpoint) -> int:
    return sum(prod(tensor.shape) for tensor in checkpoint.manifest.tensors.values())


def _columns(tensor: Tensor) -> tuple[str, ...]:
    boxes: dict[tuple[int, ...], int] = {}
    for piece in tensor.pieces:
        boxes[piece.start] = boxes.get(piece.start, 0) + 1
    size = prod(tensor.shape) * ELEMENT_BYTES * len(STATES)
    shape = " x ".join(map(str, tensor.shape))
    return shape, str(len(boxes)), str(max(boxes.values())), format_bytes(size)


def _headline(checkpoint: Checkpoint) -> str:
    manifest = checkpoint.manifest
    parameters = _elements(checkpoint)
    return (
        f"{checkpoint.folder}: step {manifest.step}, {format_count(parameters)} parameters, "
        f"{format_bytes(manifest.size)} in {len(manifest.files)} files of {manifest.world} ranks"
    )


if __name__ == "__main__":
    sys.exit(main())
