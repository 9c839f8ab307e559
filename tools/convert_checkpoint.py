"""Convert weights: `python tools/convert_checkpoint.py --to hf RUN OUT`, or `--from hf DIR OUT`.

`--to hf` takes the newest checkpoint of a run directory, of whatever layout, and writes a folder
that transformers' from_pretrained loads. `--from hf` writes a run directory with a checkpoint of
step 0 and a config.yaml, and prints the command that begins a run with these weights. Families:
gpt2, gpt_neox (Pythia too), llama, t5 (1.1) and mt5.

On the CPU, a few tensors at a time. Before the folder gets its name, both models are loaded and
run on the same tokens (this needs transformers, and memory for both): if their logits differ by
more than the tolerance, nothing is written and the exit code is 1. `--no-check` leaves that out.
"""

import argparse
import shlex
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from frontier_llm.config import RunConfig
from frontier_llm.errors import DataError
from frontier_llm.geometry.inventory import model_shapes
from frontier_llm.units import GIB, format_count
from tools.convert.families import describe_run, family_for, family_of, model_overrides
from tools.convert.ours import OurWeights, plan_shards, write_weights
from tools.convert.table import Row, check_names, select
from tools.convert.theirs import TheirWeights, read_config, write_model
from tools.convert.tokenizer_files import check_theirs, copy_to_ours, write_theirs
from tools.one_rank import on_one_rank
from tools.options import ending

SHARD_BYTES = 2 * GIB
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert; return the exit code."""
    options = _options(arguments)
    out: Path = options.out
    partial = out.with_name(f".{out.name}-{uuid.uuid4().hex[:12]}.partial")
    try:
        if out.exists():
            raise DataError(f"{out} is there already\n  do: choose another folder, or remove it")
        partial.mkdir(parents=True)
        if options.to:
            made = to_theirs(options.source, partial, options)
        else:
            made = from_theirs(options.source, partial, out)
        if options.check:
            _check(made)
            if options.to:
                check_theirs(made.theirs)
        partial.rename(out)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"{out}: {format_count(_elements(made.config))} parameters")
    if made.overrides:
        words = [f"run.init_from={out.absolute()}", *made.overrides]
        print(f"begin with it:\n  python train.py {shlex.join(words)}")
    return 0


@dataclass(frozen=True)
class Converted:
    """The same model on both sides.

    Attributes:
        config: ours.
        ours: folder of our weights.
        theirs: folder of Hugging Face's.
        overrides: of a run that begins with what came from there; empty the other way.
    """

    config: RunConfig
    ours: Path
    theirs: Path
    overrides: list[str]


def to_theirs(run: Path, out: Path, options: argparse.Namespace) -> Converted:
    """Write a folder of Hugging Face's.

    Raises:
        DataError: no family has such a model.
        CheckpointError: the weights are absent, damaged or of another model.
    """
    config = on_one_rank(run)
    family = family_for(config.model, options.family)
    shapes = model_shapes(config.model, config.data.sequence_length)
    rows = select(family.rows(config.model), shapes)
    weights = OurWeights(options.checkpoint or run)
    weights.check_names(shapes)
    dtype = DTYPES[options.dtype]

    def shard(numbers: range) -> Iterator[tuple[str, Tensor]]:
        for row in (rows[number] for number in numbers):
            parts = row.transform.to_theirs(weights.read(row.ours))
            yield from ((n, p.to(dtype)) for n, p in zip(row.theirs, parts, strict=True))

    plan = plan_shards([4 * prod(shapes[row.ours]) for row in rows], SHARD_BYTES)
    settings = {
        "model_type": family.name,
        "architectures": [family.architecture],
        "dtype": str(dtype).removeprefix("torch."),
        **write_theirs(config, out),
        **family.to_theirs(config),
    }
    write_model(out, settings, (list(shard(numbers)) for numbers in plan), len(plan))
    return Converted(config, weights.checkpoint.folder, out, [])


def from_theirs(folder: Path, out: Path, home: Path) -> Converted:
    """Write a run directory.

    Args:
        folder: of theirs.
        out: where to write.
        home: how it will be called in the end.

    Raises:
        DataError: the folder holds no model that ours can be.
    """
    settings = read_config(folder)
    family = family_of(settings)
    family.refuse_variants(settings)
    tokenizer = copy_to_ours(folder, out)
    kept = None if tokenizer is None else home.absolute() / tokenizer.name
    overrides = model_overrides(family, settings, home, kept)
    config = describe_run(overrides, out)
    shapes = model_shapes(config.model, config.data.sequence_length)
    rows = select(family.rows(config.model), shapes)
    weights = TheirWeights(folder, family.prefix)
    check_names(rows, weights.names, family.unused)

    def shard(numbers: range) -> Iterator[tuple[str, Tensor]]:
        for row in (rows[number] for number in numbers):
            yield row.ours, _take(row, weights, shapes[row.ours])

    plan = plan_shards([4 * prod(shapes[row.ours]) for row in rows], SHARD_BYTES)
    meta = {"converted_from": str(folder), "family": family.name}
    write_weights(out, (list(shard(numbers)) for numbers in plan), meta)
    return Converted(config, out, folder, overrides)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument("--to", choices=["hf"], help="from ours to Hugging Face's")
    direction.add_argument("--from", dest="origin", choices=["hf"], help="the other way round")
    parser.add_argument("source", type=Path, help="a run directory, or a folder of theirs")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--family", help="--to: where several have such models (t5, mt5)")
    parser.add_argument("--checkpoint", type=Path, help="--to: another one than the newest")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="--to: of the weights")
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=True,
        help="compare the logits of both models first (default)",
    )  # fmt: skip
    return parser.parse_args(arguments)


def _check(made: Converted) -> None:
    """Refuse a conversion that computes something else.

    Raises:
        DataError: the logits differ.
    """
    from tools.convert.check import compare

    comparison = compare(made.config, made.ours, made.theirs)
    if not comparison.passes:
        raise DataError(f"the converted model is another one: {comparison}; nothing was written")
    print(comparison)


def _take(row: Row, weights: TheirWeights, shape: tuple[int, ...]) -> Tensor:
    """Make one tensor of ours.

    Raises:
        DataError: theirs are of other shapes than config.json says.
    """
    theirs = [weights.read(name) for name in row.theirs]
    try:
        ours = row.transform.to_ours(theirs)
    except RuntimeError:
        ours = None
    if ours is None or tuple(ours.shape) != shape:
        found = ", ".join(str(list(tensor.shape)) for tensor in theirs)
        raise DataError(
            f"{row.theirs[0]} is of shape {found}: by config.json it should make {row.ours} of "
            f"{list(shape)}"
        )
    return ours


def _elements(config: RunConfig) -> int:
    shapes = model_shapes(config.model, config.data.sequence_length)
    return sum(prod(shape) for shape in shapes.values())


if __name__ == "__main__":
    sys.exit(ending(main))
