"""Inspect a checkpoint.

    frontier-llm inspect PATH                  describe the run and list the tensors
    frontier-llm inspect PATH --config         print the configuration as YAML
    frontier-llm inspect PATH --verify         compare all bytes with their digests
    frontier-llm inspect PATH --statistics     print mean, deviation, extremes, NaN
    frontier-llm inspect PATH --diff OTHER     compare the values with another checkpoint
    frontier-llm inspect PATH --export FILE    write the weights as one safetensors file

PATH is a checkpoint. A run.dir or a folder of checkpoints stands for its newest checkpoint. The
two checkpoints of --diff may have been saved with different parallel layouts. All options except
--config read the complete checkpoint and verify its digests. The exit code is 1 if an option has
found damage, a difference, or a value that is not finite.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from frontier_lab.commands.export_weights import DTYPES, export
from frontier_lab.commands.state_statistics import spreads
from frontier_lab.option_values import new_file, refuse_useless, saved
from frontier_lab.stored_weights import check_headers, read_tensor
from frontier_lab.tables import table_of_numbers
from frontier_llm.checkpoint.discovery import Checkpoint, find
from frontier_llm.checkpoint.manifest import ELEMENT_BYTES
from frontier_llm.checkpoint.range_reader import ReadAhead, Unreadable, chunk_ranges
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import tool_parser
from frontier_llm.config import RunConfig, decode
from frontier_llm.errors import IF_DAMAGED, CheckpointError, ConfigError, FrontierError
from frontier_llm.geometry.inventory import model_shapes
from frontier_llm.geometry.lengths import sample_lengths
from frontier_llm.saving.run_directory import to_yaml
from frontier_llm.units import counted, format_bytes, format_count

_LAYER = re.compile(r"\blayers\.\d+\.")

NEEDS = {"--each": "--statistics", "--dtype": "--export"}
"""Options that have no effect without another."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Inspect a checkpoint as the options say; return the exit code."""
    options = parse(arguments)
    console = wide_console()
    try:
        checkpoint = find(options.path)
        if options.config:
            return print_config(checkpoint)
        console.print(_headline(checkpoint), highlight=False)
        if options.verify:
            return verify(checkpoint, console)
        if options.statistics:
            return show_statistics(checkpoint, console, each=options.each)
        if options.export:
            return write_weights(checkpoint, console, options.export, options.dtype)
        if options.diff:
            other = find(options.diff)
            check_headers(checkpoint)
            check_headers(other)
            console.print(_headline(other), highlight=False)
            return diff(checkpoint, other, console)
        show(checkpoint, console)
    except FrontierError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = tool_parser(__doc__)
    parser.add_argument("path", type=saved, help="a checkpoint, a folder of them, or a run.dir")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--config", action="store_true", help="print the configuration")
    action.add_argument("--verify", action="store_true", help="compare the digests of all files")
    action.add_argument(
        "--statistics", action="store_true", help="print statistics of weights and both moments"
    )
    action.add_argument(
        "--diff", type=saved, metavar="OTHER", help="compare the values with another checkpoint"
    )
    action.add_argument(
        "--export", type=new_file, metavar="FILE", help="write the weights to one file"
    )
    parser.add_argument(
        "--each",
        action="store_true",
        help="--statistics: one row per tensor, not per kind of layer",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="fp32", help="--export: format (default %(default)s)"
    )
    return refuse_useless(parser, parser.parse_args(arguments), NEEDS, {})


def show(checkpoint: Checkpoint, console: Console) -> None:
    """Print what was saved, and the tensors; equal tensors of several layers share a row."""
    config = _config_of(checkpoint)
    facts = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _facts(checkpoint, config).items():
        # a terminal would obey other characters
        facts.add_row(name, Text("".join(c if c.isprintable() else "?" for c in value)))
    console.print(facts)
    columns = ("count", "shape", "boxes", "ranges", "size")
    table = table_of_numbers("tensor", columns, left=("shape",))
    table.caption = (
        "boxes: number of parts of the tensor, at most one per tensor-parallel rank; ranges: "
        "largest number of stored ranges of a box, at most one per data-parallel rank; size: bytes "
        "of the weights and both moments"
    )
    for (name, shape, boxes, size), ranges in _rows(checkpoint, config).items():
        table.add_row(name, str(len(ranges)), shape, boxes, str(max(ranges)), size)
    console.print(table)


def print_config(checkpoint: Checkpoint) -> int:
    """Print the configuration of the run as YAML; return the exit code."""
    config = checkpoint.manifest.meta.get("config")
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{checkpoint.folder} holds no configuration\n  do: name another checkpoint"
        )
    print(to_yaml(config), end="")
    return 0


def verify(checkpoint: Checkpoint, console: Console) -> int:
    """Compare all digests; return the exit code."""
    damages, unreadable, manifest = 0, set[str](), checkpoint.manifest
    ranges = [chunk for name in manifest.files for chunk in chunk_ranges(checkpoint, name)]
    with (
        Progress(console=console, transient=True) as progress,
        ReadAhead(checkpoint, ranges, verify=True) as reader,
    ):
        bar = progress.add_task("verifying", total=manifest.size)
        for range_, content in reader:
            progress.advance(bar, range_.stop - range_.start)
            if isinstance(content, Unreadable):
                unreadable.add(str(content))
            elif isinstance(content, CheckpointError):
                damages += 1
                progress.console.print(content.reason, style="bold red", soft_wrap=True)
    for reason in sorted(unreadable):
        console.print(reason, style="bold red", soft_wrap=True)
    if not damages and not unreadable:
        check_headers(checkpoint)
        console.print("all bytes match their digests")
        return 0
    files = f"; {counted(len(unreadable), 'file')} not verified" if unreadable else ""
    console.print(f"{counted(damages, 'chunk')} damaged{files}")
    if damages:
        console.print(f"  {IF_DAMAGED}")
    return 1


def show_statistics(checkpoint: Checkpoint, console: Console, *, each: bool) -> int:
    """Print statistics by kind of layer, or of `each` tensor; return the exit code."""
    row_of = str if each else _name_for_all_layers
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("reading", total=checkpoint.manifest.size)
        found = spreads(checkpoint, row_of, lambda size: progress.advance(bar, size))
    columns = ("state", "mean", "deviation", "smallest", "largest", "not finite")
    table = table_of_numbers("tensor", columns, left=("state",))
    previous = ""
    for (name, state), spread in found.items():
        numbers = (spread.mean, spread.deviation, spread.smallest, spread.largest)
        not_finite = f"{spread.not_finite} of {spread.elements}" if spread.not_finite else "0"
        name_once, previous = "" if name == previous else name, name
        table.add_row(name_once, state, *(f"{number:.4g}" for number in numbers), not_finite)
    console.print(table)
    return 1 if any(spread.not_finite for spread in found.values()) else 0


def write_weights(checkpoint: Checkpoint, console: Console, path: Path, dtype: str) -> int:
    """Write all weights to one new file; return the exit code."""
    if path.exists():
        raise ConfigError("--export", path, "a new file", "choose another one, or remove it")
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("writing", total=_elements(checkpoint))
        export(checkpoint, path, dtype, lambda count: progress.advance(bar, count))
    size = format_bytes(path.stat().st_size)
    count = len(checkpoint.manifest.tensors)
    console.print(f"{path}: {count} tensors, {dtype}, {size}", highlight=False)
    return 0


def diff(first: Checkpoint, second: Checkpoint, console: Console) -> int:
    """Compare all values of two checkpoints; return the exit code."""
    in_first, in_second = first.manifest.tensors.keys(), second.manifest.tensors.keys()
    columns = ("state", "elements that differ", "largest difference")
    table = table_of_numbers("tensor", columns, left=("state",))
    for name in sorted(in_first ^ in_second):
        table.add_row(name, "", "only in the " + ("first" if name in in_first else "second"), "")
    common = sorted(in_first & in_second)
    with Progress(console=console, transient=True) as progress:
        for name in progress.track(common, description="comparing"):
            for row in _differences(first, second, name):
                table.add_row(name, *row)
    if not table.row_count:
        console.print(f"equal: all {len(common)} tensors, weights and moments, bit by bit")
        return 0
    console.print(table)
    return 1


def _differences(first: Checkpoint, second: Checkpoint, name: str) -> list[tuple[str, str, str]]:
    """Return the state, the number of elements and the largest difference of states that differ."""
    shapes = [checkpoint.manifest.tensors[name].shape for checkpoint in (first, second)]
    if shapes[0] != shapes[1]:
        return [("", f"shape {list(shapes[0])} and {list(shapes[1])}", "")]
    old, new = read_tensor(first, name), read_tensor(second, name)
    rows = []
    for state in sorted(old.keys() ^ new.keys()):
        rows.append((state, "only in the " + ("first" if state in old else "second"), ""))
    for state in (state for state in old if state in new):
        # bits are compared, because NaN is not equal to NaN
        differ = old[state].view(torch.int32) != new[state].view(torch.int32)
        if count := int(differ.sum()):
            largest = float((old[state] - new[state]).abs().max())
            rows.append((state, f"{count} of {differ.numel()}", f"{largest:.3g}"))
    return rows


def _config_of(checkpoint: Checkpoint) -> RunConfig | None:
    """Return the configuration of the run; None if it cannot be read or is of another model."""
    try:
        config = decode(checkpoint.manifest.meta.get("config") or {})
    except (ConfigError, AttributeError, TypeError):  # values of other types than ours
        return None
    return config if config.model.layers <= len(checkpoint.manifest.tensors) else None


def _facts(checkpoint: Checkpoint, config: RunConfig | None) -> dict[str, str]:
    manifest, meta = checkpoint.manifest, dict(checkpoint.manifest.meta)
    progress, scale = meta.pop("progress", None), meta.pop("loss_scale", None)
    samples: object = progress.get("samples") if isinstance(progress, dict) else None
    facts: dict[str, object] = {"step": manifest.step, "samples": samples}
    if config is not None:
        model, parallel, data = config.model, config.parallel, config.data
        if isinstance(samples, int):
            tokens = samples * sample_lengths(model, data).total
            facts["tokens"] = format_count(tokens)
        facts |= {
            "model": f"{model.name}, {counted(model.layers, 'layer')}, hidden size {model.hidden}, "
            f"{model.heads} heads, vocabulary {model.vocabulary}",
            "layout": f"{counted(manifest.world, 'rank')}, tensor {parallel.tensor} x pipeline "
            f"{parallel.pipeline}; sharding={config.sharding.name}",
            "optimizer": f"{config.optimizer.name}, precision={config.precision.name}",
            "data": f"{data.name}, {data.global_batch} samples of {data.sequence_length} tokens "
            "per step",
        }
    facts["loss scale"] = scale.get("value") if isinstance(scale, dict) else None
    facts |= {name: value for name, value in meta.items() if name not in ("config", "start")}
    shown = {name: value for name, value in facts.items() if not isinstance(value, (dict, list))}
    return {name: str(value) for name, value in shown.items() if value is not None}


def _rows(checkpoint: Checkpoint, config: RunConfig | None) -> dict[tuple[str, ...], list[int]]:
    """Return (name, shape, boxes, size) of each row, with the ranges of the tensors that share it.

    They have the order of the model if its configuration is known, otherwise that of the manifest.
    """
    tensors, rows = checkpoint.manifest.tensors, dict[tuple[str, ...], list[int]]()
    names = model_shapes(config.model, config.data.sequence_length) if config else {}
    for name in dict.fromkeys([*(name for name in names if name in tensors), *tensors]):
        tensor = tensors[name]
        boxes = Counter(stored.start for stored in tensor.stored_ranges)
        size = prod(tensor.shape) * ELEMENT_BYTES * len(tensor.states)
        shape = " x ".join(map(str, tensor.shape))
        row = (_name_for_all_layers(name), shape, str(len(boxes)), format_bytes(size))
        rows.setdefault(row, []).append(max(boxes.values()))
    return rows


def _name_for_all_layers(name: str) -> str:
    """Replace the number of the layer in a tensor's name by `*`."""
    return _LAYER.sub("layers.*.", name)


def _elements(checkpoint: Checkpoint) -> int:
    return sum(prod(tensor.shape) for tensor in checkpoint.manifest.weights.values())


def _headline(checkpoint: Checkpoint) -> str:
    manifest = checkpoint.manifest
    parameters = _elements(checkpoint)
    return (
        f"{checkpoint.folder}: step {manifest.step}, {format_count(parameters)} parameters, "
        f"{format_bytes(manifest.size)} in {counted(len(manifest.files), 'file')} of "
        f"{counted(manifest.world, 'rank')}"
    )
