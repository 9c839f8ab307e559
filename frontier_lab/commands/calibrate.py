"""Measure this machine for the planner: `frontier-llm calibrate [cluster=NAME]`.

Starts `--ranks` processes that measure at the same time: matrix products of many shapes, attention
and element-wise kernels in each number format, the memory bandwidth, the time to start a kernel,
messages and collectives between the ranks, and steps of small models, which show the work of the
CPU and the memory that a rank needs beside its tensors. Fits the constants of config/calibration.py
to the measurements and prints them. `--write NAME` copies the file of `cluster` to
cluster/NAME.yaml in --conf-dir or conf/, and replaces the values that were measured. Nothing is
written if other programs computed meanwhile, unless `--any-load` is given.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from frontier_lab.calibration.device import device
from frontier_lab.calibration.foreign_load import (
    QUIET_CORES,
    busy_seconds,
    is_disturbed,
    own_seconds,
)
from frontier_lab.calibration.host_times import SIZES, SmallCase, cases_of
from frontier_lab.calibration.ranks import Figures, measure, measured
from frontier_lab.commands.conf_files import new_conf_file
from frontier_lab.option_values import refuse_useless, write_text
from frontier_llm.cli.compose import compose
from frontier_llm.cli.console import plain_table, wide_console
from frontier_llm.cli.options import at_least, tool_parser
from frontier_llm.config import RunConfig, decode
from frontier_llm.errors import ConfigError

FORMATS = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "bf16", "fp16")}
"""Number formats that are measured, by type of device. Not fp16 on a CPU, which is a thousand times
slower than fp32 and therefore not used."""
HOST_ROWS = {
    "layer_us": "layer",
    "tensor_us": "layer with tensor ranks, in addition",
    "micro_batch_us": "micro-batch",
    "step_us": "step",
}
"""The printed times of the CPU; those of a layer are of its forward pass."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the results, write them with `--write`; return the exit code."""
    options = _parse(arguments)
    console = wide_console()
    cluster = decode(compose(options.overrides)).cluster
    path = None if options.write is None else cluster_file(options.write)
    formats = FORMATS[device().type]
    small = {
        precision: {
            case: small_config(precision, case, options.ranks) for case in cases_of(options.ranks)
        }
        for precision in formats
    }
    figures, foreign_cores = _measured_alone(partial(measure, options.ranks, formats, small))
    values = measured(cluster.model_dump(mode="json"), figures, small)
    for table in (_products(figures), _others(figures, values)):
        console.print(table)
    if foreign_cores:
        _refuse_load(foreign_cores, console, may_write=options.any_load or not path)
    if path:
        text = f"# Measured by frontier-llm calibrate, based on cluster={values['name']}.\n"
        text += yaml.safe_dump({**values, "name": path.stem}, sort_keys=False)
        write_text(path, text, "--write")
        console.print(f"written: {path}; use it with cluster={path.stem}")
    return 0


def _measured_alone(measurement: Callable[[], Figures]) -> tuple[Figures, float]:
    """Return what was measured, and how many cores other programs used meanwhile; 0 = too few."""
    busy, own, start = busy_seconds(), own_seconds(), time.monotonic()
    figures = measurement()
    seconds = time.monotonic() - start
    busy, own = busy_seconds() - busy, own_seconds() - own
    return figures, (busy - own) / seconds if is_disturbed(busy, own, seconds) else 0.0


def _refuse_load(foreign_cores: float, console: Console, *, may_write: bool) -> None:
    """Say that other programs disturbed the measurement, as an error if it may not be written."""
    got = f"other programs used {foreign_cores:.1f} cores while this one measured"
    if may_write:
        console.print(f"warning: {got}, so these figures are not those of the machine")
        return
    wants = f"at most {QUIET_CORES:g} cores in use by others: speeds would be too low"
    todo = "end the other programs and calibrate again, or add --any-load to write these figures"
    raise ConfigError("--write", got, wants, todo)


def cluster_file(name: str) -> Path:
    """Return the path to write to: a new file, or one that an earlier calibration has written."""
    wants = "letters, digits, - and _: a new name, or that of a measured file"
    return new_conf_file("cluster", name, "--write", "# Measured", wants)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument(
        "--ranks",
        type=at_least(1),
        default=2,
        help="processes that communicate; 1 measures no collectives (default 2)",
    )
    parser.add_argument("--write", metavar="NAME", help="write the results to cluster/NAME.yaml")
    parser.add_argument(
        "--any-load", action="store_true", help="with --write: write also if others computed"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="overrides; cluster=NAME names the file to start from",
    )
    options = parser.parse_intermixed_args(arguments)
    return refuse_useless(parser, options, {"--any-load": "--write"}, {})


def small_config(precision: str, case: SmallCase, ranks: int) -> RunConfig:
    """Return the configuration of a small model whose steps are measured."""
    sizes = SIZES[device().type]
    overrides = ["model=gpt_tiny", f"model.layers={case.layers}",
                 f"model.hidden={sizes['hidden']}", f"model.heads={sizes['heads']}",
                 f"model.vocabulary={sizes['vocabulary']}",
                 f"data.vocabulary={sizes['vocabulary']}",
                 f"data.sequence_length={sizes['tokens']}", "data.micro_batch=1",
                 f"data.global_batch={case.micro_batches * ranks // case.tensor}",
                 f"parallel.tensor={case.tensor}", "parallel.pipeline=1",
                 f"precision={precision}", "checkpoint=off"]  # fmt: skip
    config: RunConfig = decode(compose(overrides))
    return config


def _products(figures: Figures) -> Table:
    columns = ("format", "m", "k", "n", "TFLOP/s", "fitted", "error")
    table = plain_table(f"Matrix products on {figures.device.name}", columns)
    for of_format in figures.products:
        for sample in of_format.samples:
            fitted_tflops = of_format.curve(sample.rows, sample.inner, sample.columns)
            table.add_row(
                of_format.precision,
                *map(str, sample[:3]),
                f"{sample.tflops:.4g}",
                f"{fitted_tflops:.4g}",
                f"{fitted_tflops / sample.tflops - 1:+.0%}",
            )
    return table


def _others(figures: Figures, values: dict[str, Any]) -> Table:
    """Return the table of all other measurements; `values` are those of the new cluster file."""
    table = plain_table("Other measurements", ("quantity", "measured"))
    device = figures.device
    table.add_row("memory bandwidth", f"{device.memory_bytes_per_second / 1e9:.1f} GB/s")
    for of_format in device.kernels:
        name = of_format.precision
        forward, backward = of_format.attention_tflops, of_format.attention_backward_tflops
        table.add_row(f"attention, {name}", f"{forward:.4g} TFLOP/s")
        table.add_row(f"attention, {name}, backward", f"{backward:.4g} TFLOP/s")
        ratio = f"{of_format.weight_gradient_ratio:.2f} of the forward product"
        table.add_row(f"weight gradient, {name}", ratio)
        speed = of_format.elementwise_bytes_per_second / 1e9
        table.add_row(f"element-wise kernels, {name}", f"{speed:.1f} GB/s")
        speed = of_format.quantise_bytes_per_second / 1e9
        table.add_row(f"kernels of quantised messages, {name}", f"{speed:.1f} GB/s")
    reserved = values["device"]["calibration"]["reserved_gib"]
    table.add_row("memory of a rank beside its tensors", f"{reserved:.2f} GiB")
    table.add_row("time to start a kernel", f"{device.kernel_seconds * 1e6:.1f} us")
    if figures.links is not None:
        for name, link in {"message": figures.links.messages, **figures.links.collectives}.items():
            table.add_row(
                name.replace("_", "-"),
                f"{link.bytes_per_second / 1e9:.2f} GB/s, {link.latency_seconds * 1e6:.0f} us",
            )
        table.add_row("hidden by computation", f"{figures.links.hidden_share:.0%}")
    for precision, times in values["device"]["calibration"]["host"].items():
        for name, per in HOST_ROWS.items():
            table.add_row(f"CPU, {precision}, per {per}", f"{times[name]:.0f} us")
    return table
