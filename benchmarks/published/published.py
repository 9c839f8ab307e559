"""Training speeds printed in papers, with their set-ups.

A figure is compared as it is printed. If a paper leaves the set-up open, `reading` names the one
that is predicted: the first reading of a figure counts, others are shown for comparison.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from frontier_llm.planner.compute import Engine

MEGATRON, FRONTIER, AMSP = "Megatron-LM", "Frontier", "AMSP"
SOURCES = {
    MEGATRON: "Narayanan et al., SC'21 (arXiv:2104.04473), table 1: TFLOP/s per A100 "
    "with recomputation; these figures have not been checked against the paper",
    FRONTIER: "Dash et al. (arXiv:2312.12705): HFU as a share of a GCD's peak",
    AMSP: "AMSP (arXiv:2311.00257): MFU on A800, counting the masked half of attention",
}
ZERO3_MESSAGE = 19_500_000
"""Elements per message of ZeRO-3 and ZeRO++, fitted to the figures of these systems."""
ZERO1_MESSAGE = 500_000_000
"""Elements per bucket of ZeRO-1: DeepSpeed's default."""
TUNED = "fastest micro-batch and chunks"

_MEGATRON_ENGINE = Engine(fused_attention=False, overlaps=False, sums_bytes=2, split_exchange=True)
_FRONTIER_ENGINE = Engine(overlaps=False, sums_bytes=2)
_AMSP_ENGINE = Engine(sums_bytes=2)
_BASELINE = Engine(overlaps=False, sums_bytes=2)
_ZERO1 = replace(_BASELINE, message_elements=ZERO1_MESSAGE)
_ZERO3 = replace(_BASELINE, message_elements=ZERO3_MESSAGE)
_HPZ = replace(_ZERO3, second_copy_ranks=8)


@dataclass(frozen=True)
class Row:
    """One published figure, or one more reading of it."""

    table: str
    name: str
    published: float
    """MFU or HFU as a share, or TFLOP/s."""
    quantity: Literal["mfu", "hfu", "hardware_tflops"]
    rounding: float
    """Half of the last digit that is printed."""
    overrides: tuple[str, ...]
    ranks: int
    engine: Engine
    reading: str = ""
    """The predicted set-up, if the paper leaves it open."""
    counts: bool = True
    """Whether this reading counts in the mean error."""


def rows() -> list[Row]:
    """Return every figure and reading, table by table."""
    return [*_megatron(), *_frontier(), *_amsp()]


def _megatron() -> Iterator[Row]:
    printed = {
        "1.7": (137, 32),
        "7.5": (142, 128),
        "18.4": (135, 256),
        "76.1": (140, 1024),
        "145.6": (148, 1536),
        "529.6": (163, 2520),
        "1008": (163, 3072),
    }
    for size, (tflops, ranks) in printed.items():
        name = f"megatron_{size.replace('.', '_')}b"
        row = Row(
            table=MEGATRON,
            name=f"{size}B on {ranks}",
            published=tflops,
            quantity="hardware_tflops",
            rounding=0.5,
            overrides=(f"experiment={name}", "collectives.grads_format=bf16"),
            ranks=ranks,
            engine=_MEGATRON_ENGINE,
            reading=TUNED,
        )
        yield row
        yield replace(row, reading="micro-batch 1, one chunk", counts=False)


def _frontier() -> Iterator[Row]:
    replica = "batch per replica"
    readings = [
        ("22B", 0.3838, "frontier_22b", 16, (), ""),
        ("175B", 0.3614, "frontier_175b", 64, (), replica),
        ("175B", 0.3614, "frontier_175b", 1024, (), "batch of all 1024 GCDs"),
        ("1T", 0.3196, "frontier_1t_tp8", 512, ("data.global_batch=1600",), f"TP 8, {replica}"),
        ("1T", 0.3196, "frontier_1t", 512, (), f"TP 4, {replica}"),
        ("1T", 0.3196, "frontier_1t", 1024, (), "TP 4, batch of all 1024 GCDs"),
    ]
    seen: set[str] = set()
    for name, share, experiment, ranks, overrides, reading in readings:
        yield Row(
            table=FRONTIER,
            name=name,
            published=share,
            quantity="hfu",
            rounding=0.00005,
            overrides=(f"experiment={experiment}", "collectives.grads_format=bf16", *overrides),
            ranks=ranks,
            engine=_FRONTIER_ENGINE,
            reading=reading,
            counts=name not in seen,
        )
        seen.add(name)


def _amsp() -> Iterator[Row]:
    """Yield rows of (model, ranks, system, MFU, factors, engine)."""
    chosen = {"7b": (1, 1, 8), "13b": (4, 4, 8), "30b": (8, 8, 32)}
    printed: list[tuple[str, int, str, float, tuple[int, int, int], Engine]] = [
        ("7b", 8, "AMSP", 0.64, chosen["7b"], _AMSP_ENGINE),
        ("7b", 8, "ZeRO-1", 0.63, (1, 1, 8), _ZERO1),
        ("7b", 8, "MiCS", 0.50, (8, 8, 8), _BASELINE),
        ("13b", 8, "ZeRO-3", 0.47, (8, 8, 8), _ZERO3),
        ("7b", 1024, "AMSP", 0.51, chosen["7b"], _AMSP_ENGINE),
        ("13b", 1024, "AMSP", 0.52, chosen["13b"], _AMSP_ENGINE),
        ("30b", 1024, "AMSP", 0.42, chosen["30b"], _AMSP_ENGINE),
        ("7b", 1024, "ZeRO-1", 0.36, (1, 1, 1024), _ZERO1),
        ("7b", 1024, "MiCS", 0.35, (8, 8, 8), _BASELINE),
        ("13b", 1024, "MiCS", 0.33, (8, 8, 8), _BASELINE),
        ("30b", 1024, "MiCS", 0.29, (16, 16, 16), _BASELINE),
        ("7b", 1024, "ZeRO++ (hpZ)", 0.04, (1024, 1024, 1024), _HPZ),
        ("13b", 1024, "ZeRO++ (hpZ)", 0.06, (1024, 1024, 1024), _HPZ),
        ("30b", 1024, "ZeRO++ (hpZ)", 0.05, (1024, 1024, 1024), _HPZ),
        ("7b", 1024, "ZeRO-3", 0.04, (1024, 1024, 1024), _ZERO3),
        ("13b", 1024, "ZeRO-3", 0.04, (1024, 1024, 1024), _ZERO3),
    ]
    for model, ranks, system, mfu, factors, engine in printed:
        keys = ("params", "grads", "optimizer")
        row = Row(
            table=AMSP,
            name=f"{model.upper()} on {ranks}, {system}",
            published=mfu,
            quantity="mfu",
            rounding=0.005,
            overrides=(
                f"experiment=amsp_llama_{model}",
                "collectives.grads_format=bf16",
                f"recompute={'full' if model == '30b' else 'none'}",
                *(f"sharding.{k}={f}" for k, f in zip(keys, factors, strict=True)),
            ),
            ranks=ranks,
            engine=engine,
            reading="full recomputation" if model == "30b" else "",
        )
        yield row
        if model == "30b":
            none = (*row.overrides, "recompute=none")
            yield replace(row, overrides=none, reading="no recomputation", counts=False)
