"""Training speeds that papers have published, with their set-ups.

If a paper does not describe the set-up completely, several set-ups are possible. Each is a
*reading* of the published value, and has a row. The first reading counts in the planner's error,
the others are shown for comparison.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from frontier_llm.planner.compute import Engine

MEGATRON, FRONTIER, AMSP = "Megatron-LM", "Frontier", "AMSP"
"""Names of the published tables."""
SOURCES = {
    MEGATRON: "Narayanan et al., SC'21 (arXiv:2104.04473), table 1: TFLOP/s per A100 "
    "with recomputation; these figures have not been checked against the paper",
    FRONTIER: "Dash et al. (arXiv:2312.12705): HFU as a share of a GCD's peak",
    AMSP: "AMSP (arXiv:2311.00257): MFU on A800, counting the masked half of attention",
}
ZERO3_MESSAGE = 19_500_000
"""Elements per message of ZeRO-3 and ZeRO++, fitted to the published values of these systems."""
ZERO1_MESSAGE = 500_000_000
"""Elements per bucket of ZeRO-1: DeepSpeed's default."""
TUNED = "fastest micro-batch and chunks"
"""Reading: the authors used the fastest micro-batch and number of model chunks per stage."""

# How each system communicates and computes; Engine explains the fields.
_MEGATRON_ENGINE = Engine(fused_attention=False, overlaps=False, sums_bytes=2, split_exchange=True)
_FRONTIER_ENGINE = Engine(overlaps=False, sums_bytes=2)
_AMSP_ENGINE = Engine(sums_bytes=2)
_BASELINE = Engine(overlaps=False, sums_bytes=2)
_ZERO1 = replace(_BASELINE, message_elements=ZERO1_MESSAGE)
_ZERO3 = replace(_BASELINE, message_elements=ZERO3_MESSAGE)
_HPZ = replace(_ZERO3, second_copy_ranks=8)

PUBLISHED_SCHEDULE = (
    "parallel.chunks=1",
    "parallel.schedule=1f1b",
    "parallel.waiting_weights=0",
    "parallel.sequence=false",
)
"""Settings of the pipeline in the paper on Frontier."""


@dataclass(frozen=True)
class Row:
    """One published value and one reading of it."""

    table: str
    """Name of the published table."""
    name: str
    """Model, number of ranks and system, for tables."""
    published: float
    """The published value: MFU or HFU as a share, or TFLOP/s."""
    quantity: Literal["mfu", "hfu", "hardware_tflops"]
    rounding: float
    """Largest error of rounding: half of the last digit that is published."""
    overrides: tuple[str, ...]
    """The configuration: an experiment, then settings `key=value`."""
    ranks: int
    """Number of GPUs."""
    engine: Engine
    """How the system communicates and computes."""
    reading: str = ""
    """The predicted set-up, if the paper leaves it open."""
    counts: bool = True
    """Whether this reading counts in the mean error."""


def rows() -> list[Row]:
    """Return every published value with all its readings, table by table."""
    return [*_megatron(), *_frontier(), *_amsp()]


def _megatron() -> Iterator[Row]:
    published = {  # billions of parameters: (TFLOP/s of a GPU, number of GPUs)
        "1.7": (137, 32),
        "7.5": (142, 128),
        "18.4": (135, 256),
        "76.1": (140, 1024),
        "145.6": (148, 1536),
        "529.6": (163, 2520),
        "1008": (163, 3072),
    }
    for size, (tflops, ranks) in published.items():
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
    pp16 = ("parallel.pipeline=16",)
    tp4 = ("parallel.tensor=4", "parallel.pipeline=128")
    readings: list[tuple[str, float, str, int, tuple[str, ...], str]] = [
        ("22B", 0.3838, "frontier_22b", 16, (), ""),
        ("175B", 0.3614, "frontier_175b", 64, pp16, replica),
        (
            "175B",
            0.3614,
            "frontier_175b",
            1024,
            pp16,
            "batch of all 1024 GCDs",
        ),
        ("1T", 0.3196, "frontier_1t_tp8", 512, ("data.global_batch=1600",), f"TP 8, {replica}"),
        ("1T", 0.3196, "frontier_1t_tp8", 512, tp4, f"TP 4, {replica}"),
        ("1T", 0.3196, "frontier_1t_tp8", 1024, tp4, "TP 4, batch of all 1024 GCDs"),
    ]
    seen: set[str] = set()
    for name, share, experiment, ranks, overrides, reading in readings:
        yield Row(
            table=FRONTIER,
            name=name,
            published=share,
            quantity="hfu",
            rounding=0.00005,
            overrides=(
                f"experiment={experiment}",
                "collectives.grads_format=bf16",
                *PUBLISHED_SCHEDULE,
                *overrides,
            ),
            ranks=ranks,
            engine=_FRONTIER_ENGINE,
            reading=reading,
            counts=name not in seen,
        )
        seen.add(name)


def _amsp() -> Iterator[Row]:
    """Yield the rows of AMSP.

    `published` has the model, the number of GPUs, the system, the MFU, the numbers of GPUs over
    which parameters, gradients and optimizer states are sharded, and the engine.
    """
    chosen = {"7b": (1, 1, 8), "13b": (4, 4, 8), "30b": (8, 8, 32)}
    published: list[tuple[str, int, str, float, tuple[int, int, int], Engine]] = [
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
    for model, ranks, system, mfu, factors, engine in published:
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
                *(f"sharding.{key}={number}" for key, number in zip(keys, factors, strict=True)),
            ),
            ranks=ranks,
            engine=engine,
            reading="full recomputation" if model == "30b" else "",
        )
        yield row
        if model == "30b":
            overrides = (*row.overrides, "recompute=none")
            yield replace(row, overrides=overrides, reading="no recomputation", counts=False)
