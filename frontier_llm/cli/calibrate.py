"""Measure this machine for the planner: `frontier-llm calibrate [cluster=NAME]`.

Measures matrix products of many shapes in each format, the memory bandwidth, attention, the start
of a kernel, and collectives between `--ranks` processes on this machine. Fits the constants of
config/calibration.py to the measurements and prints them. `--write NAME` writes the figures of
`cluster`, with measured values where there are any, to cluster/NAME.yaml in --conf-dir or conf/.
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
"""Formats that are measured. A CPU is a thousand times slower in fp16, which nobody uses there."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the figures and write them if asked to; return the exit code."""
    options = _parse(arguments)
    console = wide_console()
    cluster = decode(compose(options.overrides)).cluster
    path = None if options.write is None else cluster_file(options.write)
    # Before anything starts torch's threads, because the ranks are forked.
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
    """Return the path of a new cluster file, or of a measured one, which may be replaced.

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
    """Return the values of a cluster file, replaced by measured ones where there are any."""
    source = f"measured on {device.name} by frontier-llm calibrate"
    calibration = dict(cluster["device"]["calibration"])
    of_format = next(p.tflops for p in products if p.precision == device.attention_format)
    calibration |= {
        "products": {
            **calibration["products"],
            **{
                p.precision: {"tflops": round(p.tflops, 5), "half_size": round(p.half_size, 1)}
                for p in products
            },
        },
        "attention_share": round(device.attention_tflops / of_format, 3),
        "kernel_us": round(device.kernel_seconds * 1e6, 2),
        "source": f"{source}; hidden_share, reserved_gib, slack_share from the file it is based on",
    }
    stream = device.memory_bytes_per_second / 1e9
    share = min(1.0, stream / cluster["device"]["memory_gb_per_second"])
    calibration["memory_share"] = round(share, 3)
    changed: dict[str, Any] = {**cluster["device"], "calibration": calibration}
    if stream > cluster["device"]["memory_gb_per_second"]:
        changed |= {"memory_gb_per_second": round(stream, 1), "source": source}
    nearest = dict(cluster["links"][0])
    if links is not None:
        nearest |= {
            "latency_us": round(links.latency_seconds * 1e6, 1),
            "gb_per_second": round(links.bytes_per_second / 1e9, 2),
            "efficiency": 1.0,
            "source": f"{source}: all-gathers between {links.ranks} ranks",
        }
    return {**cluster, "device": changed, "links": [nearest, *cluster["links"][1:]]}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument(
        "--ranks",
        type=at_least(1),
        default=2,
        help="processes that communicate; 1 measures no collectives (default 2)",
    )
    parser.add_argument("--write", metavar="NAME", help="write the figures to cluster/NAME.yaml")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides; cluster=NAME is the basis"
    )
    return parser.parse_intermixed_args(arguments)


def _tables(
    products: Sequence[ProductFigures], device: DeviceFigures, links: LinkFigures | None
) -> Iterator[Table]:
    table = Table(title=f"Matrix products on {device.name}", title_justify="left")
    for column in ("format", "m", "k", "n", "TFLOP/s", "fitted", "error"):
        table.add_column(column)
    for figures in products:
        for sample in figures.samples:
            curve = figures.curve(sample.rows, sample.inner, sample.columns)
            table.add_row(
                figures.precision,
                *map(str, sample[:3]),
                f"{sample.tflops:.4g}",
                f"{curve:.4g}",
                f"{curve / sample.tflops - 1:+.0%}",
            )
    yield table
    table = Table(title="Everything else", title_justify="left")
    table.add_column("figure")
    table.add_column("measured")
    table.add_row("memory stream", f"{device.memory_bytes_per_second / 1e9:.1f} GB/s")
    table.add_row("attention", f"{device.attention_tflops:.4g} TFLOP/s")
    table.add_row("start of a kernel", f"{device.kernel_seconds * 1e6:.1f} us")
    if links is not None:
        table.add_row("all-gather, bandwidth", f"{links.bytes_per_second / 1e9:.2f} GB/s")
        table.add_row("all-gather, latency", f"{links.latency_seconds * 1e6:.0f} us")
    yield table


def _write(path: Path, values: dict[str, Any]) -> None:
    text = f"# Measured by frontier-llm calibrate, based on cluster={values['name']}.\n"
    path.write_text(text + yaml.safe_dump({**values, "name": path.stem}, sort_keys=False))
