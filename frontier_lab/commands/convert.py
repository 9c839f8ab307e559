"""Convert weights: `frontier-llm convert --to hf RUN OUT`, or `--from hf DIR OUT`.

`--to hf` exports: it reads the newest checkpoint of the run directory RUN and writes a folder that
from_pretrained of transformers loads. `--from hf` imports: it reads such a folder, writes a run
directory with a checkpoint of step 0 and a config.yaml, and prints the command that starts a run
with these weights. The supported families of models are gpt2, gpt_neox (with Pythia), llama,
mistral, qwen2, qwen3 (without experts), olmo2, gemma2, gemma3_text, t5gemma, t5gemma2 (without
images), t5 (1.1) and mt5.

The conversion runs on the CPU, a few tensors at a time. Then both models are run on the same
tokens, which needs transformers and memory for both models. If their logits differ by more than the
tolerance, the output is removed and the exit code is 1. `--no-check` skips this comparison.

In the code, "ours" is this project's format and "theirs" is the format of Hugging Face.
"""

import argparse
import shlex
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from frontier_lab.convert.carried import carried_parts, carry, merged
from frontier_lab.convert.families import check_surplus, family_for, family_of, model_overrides
from frontier_lab.convert.ours import OurWeights, plan_shards, write_weights
from frontier_lab.convert.table import Row, select, surplus_names
from frontier_lab.convert.theirs import TheirWeights, read_config, write_model
from frontier_lab.convert.tokenizer_files import check_theirs, copy_to_ours, write_theirs
from frontier_lab.option_values import refuse_useless, saved_in_run, trained_run
from frontier_lab.single_process_model import single_process_run
from frontier_llm.cli.compose import compose
from frontier_llm.cli.options import folder, path, tool_parser
from frontier_llm.config import RunConfig, decode
from frontier_llm.config.rules import check
from frontier_llm.data.tokenizer_source import digest_tokenizer, mode_tokens
from frontier_llm.errors import ConfigError, DataError, FrontierError, file_failure
from frontier_llm.geometry.inventory import count_parameters, model_shapes
from frontier_llm.saving import run_directory
from frontier_llm.units import GIB, format_count

SHARD_BYTES = 2 * GIB
"""Largest size of one file of weights."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

NEEDS = dict.fromkeys(("--family", "--checkpoint", "--dtype"), "--to")
"""Options that have no effect without another."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert weights; return the exit code."""
    options = _options(arguments)
    out: Path = options.out
    partial = out.with_name(f".{out.name}-{uuid.uuid4().hex[:12]}.partial")
    try:
        if out.exists():
            raise ConfigError("OUT", out, "a new folder", "choose another one, or remove it")
        partial.mkdir(parents=True)
        if options.to:
            converted = to_theirs(options.source, partial, options)
        else:
            converted = from_theirs(options.source, partial, out)
        if options.check:
            from frontier_lab.convert.compare_logits import compare

            comparison = compare(converted.config, converted.ours, converted.theirs)
            if not comparison.passes:
                reason = f"the converted model differs: {comparison}; nothing was written"
                raise FrontierError(reason)
            print(comparison)
            if options.to:
                check_theirs(converted.theirs)
        partial.rename(out)
    except OSError as error:
        raise DataError(file_failure(out, "written", error)) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    config = converted.config
    count = count_parameters(config.model, config.data.sequence_length)
    print(f"{out}: {format_count(count)} parameters")
    if options.to and (modes := mode_tokens(config)):
        ids = ", ".join(f"{name} is {token}" for name, token in modes.items())
        first = config.data.mode_of_prompt(has_gaps=False)
        print(
            f"inputs begin with the token id of a mode, which has no text in the tokenizer: {ids}; "
            f"a text that is to be continued begins with {first}"
        )
    if converted.overrides:
        words = [f"run.init_from={out.absolute()}", *converted.overrides]
        if config.data.tokenizer is None:
            print(
                "these weights have no tokenizer: write data.tokenizer=PATH instead of "
                "data.vocabulary, or, to train new embeddings for another one, add "
                "'run.allow_changes=[data.tokenizer]'"
            )
        print(f"start a run with these weights:\n  frontier-llm train {shlex.join(words)}")
    return 0


@dataclass(frozen=True)
class Converted:
    """The same model in both formats, and the overrides that start a run with imported weights."""

    config: RunConfig
    ours: Path
    theirs: Path
    overrides: list[str]


def to_theirs(run: Path, out: Path, options: argparse.Namespace) -> Converted:
    """Export the run directory `run`: write a Hugging Face folder into the empty folder `out`."""
    config, found = single_process_run(run, options.checkpoint)
    family = family_for(config.model, options.family)
    shapes = model_shapes(config.model, config.data.sequence_length)
    rows = select(family.rows(config.model), shapes)
    weights = OurWeights(found)
    checkpoint = weights.checkpoint
    weights.check_names(shapes)
    dtype = DTYPES[options.dtype]

    def converted_rows(numbers: range) -> Iterator[tuple[str, Tensor]]:
        for row in (rows[number] for number in numbers):
            tensors = row.transform.to_theirs(weights.read(row.ours))
            for name, tensor in zip(row.theirs, tensors, strict=True):
                yield name, tensor.to(dtype)

    file_plan = plan_shards([4 * prod(shapes[row.ours]) for row in rows], SHARD_BYTES)
    settings = {
        "model_type": family.name,
        "architectures": [family.architecture],
        "dtype": str(dtype).removeprefix("torch."),
        **write_theirs(config, out, checkpoint.manifest.meta, checkpoint.folder),
        **family.to_theirs(config),
    }
    carried, of_carried = carried_parts(config, family, dtype)
    files = chain((list(converted_rows(numbers)) for numbers in file_plan), carried)
    write_model(out, merged(settings, of_carried), files, len(file_plan) + len(carried))
    return Converted(config, checkpoint.folder, out, [])


def from_theirs(folder: Path, out: Path, home: Path) -> Converted:
    """Import a Hugging Face folder: write a run directory into the empty folder `out`.

    `home` is the final path of `out`, which is renamed when the conversion is complete.
    """
    settings = read_config(folder)
    family = family_of(settings)
    weights = TheirWeights(folder, family.prefix)
    tokenizer = copy_to_ours(folder, out)
    final_tokenizer = None if tokenizer is None else home.absolute() / tokenizer.name
    overrides = model_overrides(family, settings, home, final_tokenizer, weights)
    config = _write_config(overrides, out)
    shapes = model_shapes(config.model, config.data.sequence_length)
    rows = select(family.rows(config.model), shapes)
    surplus = carry(family, weights, settings, surplus_names(rows, weights.names), out)
    check_surplus(family, weights, surplus, config.model.rotary_base)

    def converted_rows(numbers: range) -> Iterator[tuple[str, Tensor]]:
        for row in (rows[number] for number in numbers):
            yield row.ours, _to_ours(row, weights, shapes[row.ours])

    file_plan = plan_shards([4 * prod(shapes[row.ours]) for row in rows], SHARD_BYTES)
    model = config.model_dump(mode="json", include={"model"})
    told = {**model, "data": {"sequence_length": config.data.sequence_length}}
    meta = {"converted_from": str(folder), "family": family.name, "config": told}
    if tokenizer is not None:
        meta["tokenizer"] = digest_tokenizer(out)
    write_weights(out, (list(converted_rows(numbers)) for numbers in file_plan), meta)
    return Converted(config, out, folder, overrides)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument("--to", choices=["hf"], help="export a run to Hugging Face's format")
    direction.add_argument(
        "--from", dest="origin", choices=["hf"], help="import a Hugging Face folder"
    )
    parser.add_argument("source", type=folder, help="a run directory or a Hugging Face folder")
    parser.add_argument("out", type=path, help="the folder to write")
    parser.add_argument("--family", help="--to: t5 or mt5, whose models are equal")
    parser.add_argument("--checkpoint", type=saved_in_run, help="--to: of a run (default: newest)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="--to: number format")
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=True,
        help="compare the logits of both models (default)",
    )  # fmt: skip
    options = refuse_useless(parser, parser.parse_args(arguments), NEEDS, {})
    if options.to:
        trained_run(str(options.source))
    return options


def _to_ours(row: Row, weights: TheirWeights, shape: tuple[int, ...]) -> Tensor:
    """Return our tensor that corresponds to one or more of their tensors."""
    theirs = [weights.read(name) for name in row.theirs]
    try:
        ours = row.transform.to_ours(theirs)
    except RuntimeError:
        ours = None
    if ours is None or tuple(ours.shape) != shape:
        found = ", ".join(str(list(tensor.shape)) for tensor in theirs)
        raise DataError(
            f"{row.theirs[0]} has shape {found}, which by config.json should give {row.ours} of "
            f"shape {list(shape)}\n  do: restore config.json and the weights from one source"
        )
    return ours


def _write_config(overrides: Sequence[str], out: Path) -> RunConfig:
    """Write the config.yaml of a run directory with imported weights."""
    composed = compose(["parallel.pipeline=1", "launch.ranks=1", *overrides])
    run_directory.write_config(out, run_directory.to_yaml(composed))
    config = decode(composed)
    check(config, world_size=1)
    return config
