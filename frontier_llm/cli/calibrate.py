"""Measure this machine for the planner: `frontier-llm calibrate [cluster=NAME]`.

Measures matrix products of many shapes in each number format, the memory bandwidth, attention, the
time to start a kernel, and collectives between `--ranks` processes on this machine. Fits the
constants of config/calibration.py to the measurements and prints them. `--write NAME` copies the
file of `cluster` to cluster/NAME.yaml in --conf-dir or conf/, and replaces the values that were
measured.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from frontier_llm.calibration import timing
from frontier_llm.calibration.device import DeviceFigures, measure_device
from frontier_llm.calibration.links import LinkFigures, measure_links
from frontier_llm.calibration.products import ProductFigures, measure_products
from frontier_llm.cli.compose import compose
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import at_least, tool_parser
from frontier_llm.cli.package_files import new_conf_file
from frontier_llm.config import decode
from frontier_llm.errors import ConfigError

FORMATS = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "bf16", "fp16")}
"""Number formats that are measured, by type of device. Not fp16 on a CPU, which is a thousand times
slower than fp32 and therefore not used."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the results, write them with `--write`; return the exit code."""
    options = _parse(arguments)
    console = wide_console()
    cluster = decode(compose(options.overrides)).cluster
    path = None if options.write is None else cluster_file(options.write)
    # The links come first: their ranks are forked, which must happen before torch starts threads.
    links = measure_links(options.ranks) if options.ranks > 1 else None
    products = [measure_products(name) for name in FORMATS[timing.device().type]]
    device = measure_device()
    for table in _tables(products, device, links):
        console.print(table)
    if path:
        _write(path, measured(cluster.model_dump(mode="json"), products, device, links))
        console.print(f"written: {path}; use it with cluster={path.stem}")
    return 0


def cluster_file(name: str) -> Path:
    """Return the path to write to: a new file, or one that an earlier calibration has written.

    Raises:
        ConfigError: the name is not a valid file name, belongs to a file that was not measured, or
            there is no configuration directory to write to.
    """
    wants = "letters, digits, - and _: a new name, or that of a measured file"
    if not re.fullmatch(r"\w[\w-]*", name):
        raise ConfigError("--write", name, wants, "choose another name")
    path = new_conf_file("cluster", name, "--write")
    if path.exists() and "# Measured" not in path.read_text():
        raise ConfigError("--write", name, wants, "choose another name")
    return path


def measured(
    cluster: dict[str, Any],
    products: Sequence[ProductFigures],
    device: DeviceFigures,
    links: LinkFigures | None,
) -> dict[str, Any]:
    """Return the content of the new cluster file: `cluster` with the measured values replaced.

    Args:
        cluster: content of the file that the calibration is based on.
        products: measured speed of matrix products, one element per number format.
        device: measured speed of memory, attention and kernel starts.
        links: measured all-gathers between the ranks; None if there was only one rank.
    """
    source = f"measured on {device.name} by frontier-llm calibrate"
    calibration = dict(cluster["device"]["calibration"])
    product_tflops = next(p.tflops for p in products if p.precision == device.attention_format)
    calibration |= {
        "products": {
            **calibration["products"],
            **{
                p.precision: {"tflops": round(p.tflops, 5), "half_size": round(p.half_size, 1)}
                for p in products
            },
        },
        "attention_share": round(device.attention_tflops / product_tflops, 3),
        "kernel_us": round(device.kernel_seconds * 1e6, 2),
        "source": f"{source}; hidden_share, memory and channels from the file it is based on",
    }
    measured_gb = device.memory_bytes_per_second / 1e9
    nominal_gb = cluster["device"]["memory_gb_per_second"]
    calibration["memory_share"] = round(min(1.0, measured_gb / nominal_gb), 3)
    new_device: dict[str, Any] = {**cluster["device"], "calibration": calibration}
    new_device["processors"] = products[0].processors
    if measured_gb > nominal_gb:
        new_device |= {"memory_gb_per_second": round(measured_gb, 1), "source": source}
    local_link = dict(cluster["links"][0])
    if links is not None:
        local_link |= {
            "latency_us": round(links.latency_seconds * 1e6, 1),
            "gb_per_second": round(links.bytes_per_second / 1e9, 2),
            "efficiency": 1.0,
            "source": f"{source}: all-gathers between {links.ranks} ranks",
        }
    return {**cluster, "device": new_device, "links": [local_link, *cluster["links"][1:]]}


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
        "overrides",
        nargs="*",
        metavar="key=value",
        help="overrides; cluster=NAME names the file to start from",
    )
    return parser.parse_intermixed_args(arguments)


def _tables(
    products: Sequence[ProductFigures], device: DeviceFigures, links: LinkFigures | None
) -> Iterator[Table]:
    table = Table(title=f"Matrix products on {device.name}", title_justify="left")
    for column in ("format", "m", "k", "n", "TFLOP/s", "fitted", "error"):
        table.add_column(column)
    for of_format in products:
        for sample in of_format.samples:
            fitted_tflops = of_format.curve(sample.rows, sample.inner, sample.columns)
            table.add_row(
                of_format.precision,
                *map(str, sample[:3]),
                f"{sample.tflops:.4g}",
                f"{fitted_tflops:.4g}",
                f"{fitted_tflops / sample.tflops - 1:+.0%}",
            )
    yield table
    table = Table(title="Other measurements", title_justify="left")
    table.add_column("quantity")
    table.add_column("measured")
    table.add_row("memory bandwidth", f"{device.memory_bytes_per_second / 1e9:.1f} GB/s")
    table.add_row("attention", f"{device.attention_tflops:.4g} TFLOP/s")
    table.add_row("time to start a kernel", f"{device.kernel_seconds * 1e6:.1f} us")
    if links is not None:
        table.add_row("all-gather, bandwidth", f"{links.bytes_per_second / 1e9:.2f} GB/s")
        table.add_row("all-gather, latency", f"{links.latency_seconds * 1e6:.0f} us")
    yield table


def _write(path: Path, values: dict[str, Any]) -> None:
    text = f"# Measured by frontier-llm calibrate, based on cluster={values['name']}.\n"
    path.write_text(text + yaml.safe_dump({**values, "name": path.stem}, sort_keys=False))
