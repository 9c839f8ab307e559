"""Measure this machine for the planner: `python tools/calibrate.py [cluster=NAME]`.

Measures matrix products of many shapes in each format, a stream through memory, attention, the
start of a kernel, and collectives between `--ranks` processes on this machine; fits the constants
of config/calibration.py to them, and prints them. `--write NAME` writes conf/cluster/NAME.yaml:
the figures of `cluster` with what was measured in their place.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontier_llm.config import decode
from frontier_llm.errors import ConfigError
from tools.calibration import timing
from tools.calibration.collectives import LinkFigures, measure_links
from tools.calibration.device import DeviceFigures, measure_device
from tools.calibration.products import ProductFigures, measure_products
from tools.compose import CONF, compose
from tools.console import wide_console
from tools.options import at_least, ending, tool_parser

FORMATS = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "bf16", "fp16")}
"""That are measured; a CPU is a thousand times slower in fp16, and nobody trains so."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write what is asked for; return the exit code."""
    options = _parse(arguments)
    console = wide_console()
    cluster = decode(compose(options.overrides)).cluster
    path = None if options.write is None else cluster_file(options.write)
    # before torch starts its threads: the ranks are forked
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
    """Return the file of a cluster that may be written.

    Raises:
        ConfigError: the name is none, or that of a file which nobody measured.
    """
    path = CONF / "cluster" / f"{name}.yaml"
    is_name = re.fullmatch(r"\w[\w-]*", name)
    if not is_name or (path.exists() and "# Measured" not in path.read_text()):
        wants = "letters, digits and _: a new name, or that of a measured file"
        raise ConfigError("--write", name, wants, "choose another name")
    return path


def measured(
    cluster: dict[str, Any],
    products: Sequence[ProductFigures],
    device: DeviceFigures,
    links: LinkFigures | None,
) -> dict[str, Any]:
    """Return a cluster's values with what was measured in their place, and said so."""
    source = f"measured on {device.name} by tools/calibrate.py"
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
        "source": f"{source}; hidden_share, reserved_gib, slack_share as in the file it began with",
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
        "--ranks", type=at_least(1), default=2, help="that talk; 1 = none (default 2)"
    )
    parser.add_argument("--write", metavar="NAME", help="write conf/cluster/NAME.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="cluster=NAME")
    return parser.parse_intermixed_args(arguments)


def _tables(
    products: Sequence[ProductFigures], device: DeviceFigures, links: LinkFigures | None
) -> Iterator[Table]:
    table = Table(title=f"Matrix products on {device.name}", title_justify="left")
    for column in ("format", "m", "k", "n", "TFLOP/s", "by the curve", "error"):
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
    text = f"# Measured by tools/calibrate.py, on top of cluster={values['name']}.\n"
    path.write_text(text + yaml.safe_dump({**values, "name": path.stem}, sort_keys=False))


if __name__ == "__main__":
    sys.exit(ending(main))
