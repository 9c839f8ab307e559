"""Write the tables of docs/collectives.md: bytes between nodes, and what can be combined.

`python -m docs.generate.collectives_page` reports whether the tables are out of date, and `--write`
writes them.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs.generate.marked_page import filled, keep_current
from frontier_llm.cli.compose import compose
from frontier_llm.cli.options import run_command
from frontier_llm.cli.package_files import CONF
from frontier_llm.config.collectives import CollectivesConfig
from frontier_llm.config.support import AXES, REFUSALS, Cell, verdict
from frontier_llm.geometry.formats import StateFormats
from frontier_llm.geometry.grid import Grid, level_borders
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.state_traffic import StateTraffic
from frontier_llm.geometry.wire import gather_bytes

PAGE = CONF.parent / "docs" / "collectives.md"
NODES, PER_NODE = 4, 8
"""Nodes, and ranks per node, of the table of bytes."""
DATA = NODES * PER_NODE
"""Number of data-parallel ranks."""
ELEMENTS, SMALL = 12 * 6144**2, 13 * 6144
"""Elements of a layer of the 18B model: those of matrices, and those of norms and biases."""
MICRO_BATCHES = (1, 4, 16)
"""Numbers of micro-batches per step, `M` in the table."""
SIGNS = {"tested": "yes", "untested": "not run", "refused": "refused"}

"""Cells of the table of combinations."""
IN_BF16 = "collectives=bf16"
"""Override that sends gradients in bf16."""


@dataclass(frozen=True)
class Scheme:
    """One row of the table of bytes."""

    name: str
    """First column of the row."""
    factors: tuple[int, int, int]
    """Ranks over which parameters, gradients and optimizer states are sharded."""
    collectives: str
    """Overrides of `conf/collectives`."""


SCHEMES = (
    Scheme("`sharding=zero3 collectives=bf16`", (DATA, DATA, DATA), IN_BF16),
    Scheme("`sharding=zero3 collectives=zeropp`", (DATA, DATA, DATA), "collectives=zeropp"),
    Scheme("`sharding=zeropp collectives=bf16`", (PER_NODE, DATA, DATA), IN_BF16),
    Scheme("`sharding=zeropp collectives=zeropp`", (PER_NODE, DATA, DATA), "collectives=zeropp"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page's tables, or report whether they are out of date; return the exit code."""
    return keep_current(__doc__, "docs.generate.collectives_page", arguments, files)


def files() -> dict[Path, str]:
    """Return the page with its tables."""
    tables = {"bytes": volumes(), "support": support()}
    return {PAGE: filled(PAGE.read_text(), tables)}


def volumes() -> Iterator[str]:
    """Yield the table of bytes that leave a node in a step.

    The unit is the size of the model in 16 bits.
    """
    yield (
        "| scheme | "
        + " | ".join(f"M = {m}" for m in MICRO_BATCHES)
        + " | "
        + " | ".join(f"relative to ZeRO-3, M = {m}" for m in MICRO_BATCHES)
        + " |"
    )
    yield "|---|" + "---|" * (2 * len(MICRO_BATCHES))
    zero3 = [zero3_in_rings(m) for m in MICRO_BATCHES]
    yield _row("ZeRO-3 in bf16, in rings", zero3, zero3)
    yield _row("ZeRO++ as published, without scales", [published(m) for m in MICRO_BATCHES], zero3)
    for scheme in SCHEMES:
        yield _row(scheme.name, [leaves_a_node(scheme, m) for m in MICRO_BATCHES], zero3)


def zero3_in_rings(micro_batches: int) -> float:
    """Return the volume of ZeRO-3 in multiples of the 16-bit model.

    Two gathers and a reduce-scatter are rings over all ranks. In a ring one rank of each node sends
    to another node.
    """
    return micro_batches * 3 * gather_bytes(1.0, DATA)


def published(micro_batches: int) -> float:
    """Return the volume of ZeRO++ (arXiv:2306.10209) in multiples of the 16-bit model.

    ZeRO++ sends int8 parameters in the forward pass, no parameters in the backward pass, and int4
    gradients.
    """
    return micro_batches * (0.5 + 0.25) * (1 - 1 / NODES)


def leaves_a_node(scheme: Scheme, micro_batches: int) -> float:
    """Return what the ranks of a node send to other nodes in a step, relative to the 16-bit model.

    Gathers and gradients in fp32 use rings. Other gradients are sent between pairs of ranks.
    """
    formats = _formats(scheme.collectives)
    grid = Grid(1, DATA, 1, PER_NODE)
    borders = level_borders(grid) if formats.exchanges else ()
    factors = Factors(*scheme.factors, DATA, formats.encodes_sums, borders)
    size = factors.padded(ELEMENTS + SMALL)
    traffic = StateTraffic(
        grid,
        factors,
        micro_batches,
        params_bytes=2,
        formats=formats,
    )
    by_rank = [traffic.unit(rank, size, decayed=ELEMENTS) for rank in range(PER_NODE)]
    inter_bytes = sum(sent.network for of_rank in by_rank for sent in of_rank.values())
    return inter_bytes / (2 * size)


@cache
def _formats(override: str) -> StateFormats:
    return StateFormats.at(CollectivesConfig.model_validate(compose([override])["collectives"]))


def support() -> Iterator[str]:
    """Yield the table of combinations, one row per precision and presets with the same signs."""
    yield "| precision | `collectives=` | " + " | ".join(AXES["device"]) + " |"
    yield "|---|---|" + "---|" * len(AXES["device"])
    for precision in AXES["precision"]:
        presets: dict[tuple[str, ...], list[str]] = {}
        for preset in AXES["collectives"]:
            signs = tuple(
                _sign({"precision": precision, "collectives": preset, "device": device})
                for device in AXES["device"]
            )
            presets.setdefault(signs, []).append(f"`{preset}`")
        for signs, names in presets.items():
            yield f"| {precision} | {', '.join(names)} | " + " | ".join(signs) + " |"
    yield ""
    yield "Refused combinations, with the error message:"
    yield ""
    for refusal in REFUSALS:
        conditions = " and ".join(
            f"{axis} = {' or '.join(values)}" for axis, values in refusal.where.items()
        )
        yield f"- If {conditions}: `{refusal.key}` wants {refusal.why}"


def _sign(part: Cell) -> str:
    """Return the sign of a combination of precision, preset and device.

    The sign is usually the same for all sharding factors and pipelines; otherwise all signs are
    returned.
    """
    found = {
        verdict({**part, "sharding": sharding, "pipeline": pipeline})[0]
        for sharding in AXES["sharding"]
        for pipeline in AXES["pipeline"]
    }
    return " or ".join(sorted(SIGNS[name] for name in found))


def _row(name: str, volumes: Sequence[float], base: Sequence[float]) -> str:
    """Return a row with volumes, and with these volumes relative to others, such as 1/4.0."""
    cells = [f"{volume:.2f}" for volume in volumes]
    cells += [f"1/{other / volume:.1f}" for volume, other in zip(volumes, base, strict=True)]
    return f"| {name} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(run_command(main))
