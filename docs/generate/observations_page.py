"""The charts and the tables of docs/observations.md, which the planner predicts.

They show how the throughput of Frontier's models depends on one setting at a time.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from docs.generate.blocks import headed
from docs.generate.drawing import FOURTH, IMAGES, NEUTRAL, OURS, THEIRS, chart, draw_groups, panels
from docs.generate.predictions import predict
from frontier_llm.cli.experiments import composed
from frontier_llm.geometry.host_pool import STATE_BYTES
from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.planner.estimate import Estimate
from frontier_llm.units import GIB

LINE_COLOURS = (OURS, THEIRS, FOURTH)
ONE_CHUNK = ("parallel.chunks=1", "parallel.schedule=1f1b", "parallel.waiting_weights=0")
OF_175B = ("experiment=frontier_175b_scaling", "data.micro_batch=1")
OF_1T = ("experiment=frontier_1t_scaling", "data.micro_batch=1")
MODELS = ("gpt_1_4b", "gpt_22b", "gpt_175b", "gpt_1t")
PARAMETER_BYTES, SUM_BYTES = 2, 4
"""Bytes per parameter: of the parameters in fp16, and of our sums of gradients in fp32."""


class Chart(NamedTuple):
    """Lines over one setting."""

    label: str
    """The setting, which is the horizontal axis."""
    lines: Mapping[str, Mapping[int, float]]
    """By the name of a line: percent of the peak, by the value of the setting."""


class Recomputation(NamedTuple):
    """A model with and without recomputation of all layers."""

    model: str
    tokens: tuple[float, float]
    """Tokens per second and GCD without and with recomputation."""
    memory: tuple[float, float]
    """GiB of the fullest rank without and with recomputation."""


@cache
def tensor() -> Chart:
    """Vary the tensor size, with the same number of GCDs and of micro-batches per replica."""
    return Chart("tensor size", {
        "1.4B on 8 GCDs": {size: _percent((
            "experiment=frontier_1_4b", *ONE_CHUNK, "parallel.pipeline=1", "data.micro_batch=4",
            f"parallel.tensor={size}", f"data.global_batch={8 // size * 4 * 40}",
        ), 8) for size in (1, 2, 4, 8)},
        "22B on 128 GCDs, PP 8": {size: _percent((
            "experiment=frontier_22b", *ONE_CHUNK, f"parallel.tensor={size}",
            f"data.global_batch={16 // size * 256}",
        ), 128) for size in (1, 2, 4, 8, 16)},
    })  # fmt: skip


@cache
def pipeline() -> Chart:
    """Vary the number of stages of one replica, with a fixed batch and with a growing one."""
    sizes = (16, 32, 48, 96)
    return Chart("pipeline size", {
        name: {
            size: _percent((*OF_175B, f"parallel.pipeline={size}", f"data.global_batch={batch}"),
                           4 * size)
            for size, batch in zip(sizes, batches, strict=True)
        }
        for name, batches in {
            "128 micro-batches": [128] * len(sizes),
            "8 micro-batches per stage": [8 * size for size in sizes],
        }.items()
    })  # fmt: skip


@cache
def micro_batches() -> Chart:
    """Vary the number of micro-batches of one replica, until the bubble no longer matters."""
    counts = (8, 16, 32, 64, 128, 256, 512, 1024)
    return Chart("micro-batches per replica", {
        name: {
            count: _percent((*experiment, f"data.global_batch={count}"), ranks) for count in counts
        }
        for name, experiment, ranks in (("175B, PP 16", OF_175B, 64), ("1T, PP 64", OF_1T, 512))
    })  # fmt: skip


@cache
def chunks() -> Chart:
    """Vary the model chunks per stage of an interleaved schedule, with several batches."""
    return Chart("model chunks per stage", {
        f"{count} micro-batches": {size: _percent((
            *OF_175B, f"parallel.chunks={size}", f"data.global_batch={count}",
            f"parallel.schedule={'1f1b' if size == 1 else 'interleaved'}",
        ), 64) for size in (1, 2, 3, 6)}
        for count in (16, 64, 256)
    })  # fmt: skip


@cache
def attention() -> Chart:
    """Vary the sequence length, with and without flash attention."""
    names = {"flash attention": "true", "attention scores in memory": "false"}
    return Chart("sequence length", {
        name: {length: _percent((
            "experiment=frontier_22b", *ONE_CHUNK, f"data.sequence_length={length}",
            f"planner.engine.fused_attention={value}",
        ), 16) for length in (1024, 2048, 4096, 8192)}
        for name, value in names.items()
    })  # fmt: skip


@cache
def recomputation() -> list[Recomputation]:
    """Predict models with and without recomputation of all layers."""
    runs = {
        "22B": (("experiment=frontier_22b", *ONE_CHUNK), 16),
        "175B": ((*OF_175B, "data.global_batch=10240"), 1024),
        "1T": (OF_1T, 3072),
    }
    rows = []
    for model, (overrides, ranks) in runs.items():
        kept, recomputed = (
            _run((*overrides, f"recompute={mode}"), ranks) for mode in ("none", "full")
        )
        tokens = [float(f"{run.tokens_per_device:.3g}") for run in (kept, recomputed)]
        memory = [round(run.peak.total / GIB, 1) for run in (kept, recomputed)]
        rows.append(Recomputation(model, (tokens[0], tokens[1]), (memory[0], memory[1])))
    return rows


@headed(
    "model", "parameters", "parameters, 2 bytes", "gradients, 4 bytes",
    "optimizer states, 12 bytes", "together", "GCDs of 64 GiB",
)  # fmt: skip
def memory_table() -> Iterator[list[object]]:
    """Yield the model states of each model."""
    device_bytes = composed("cluster=frontier_mi250x").cluster.device.memory_gib * GIB
    for name in MODELS:
        count = count_parameters(composed(f"model={name}").model, 2048)
        sizes = [count * each for each in (PARAMETER_BYTES, SUM_BYTES, STATE_BYTES)]
        cells = [f"{size / 1e9:,.0f} GB" for size in (*sizes, sum(sizes))]
        yield [f"`{name}`", f"{count / 1e9:,.1f}B", *cells, -(-sum(sizes) // int(device_bytes))]


def _percent(overrides: Sequence[str], ranks: int) -> float:
    """Return the percent of the peak with recomputation; a tenth of a percent is the precision."""
    return round(100 * (_run(overrides, ranks).hfu or 0), 1)


def _run(overrides: Sequence[str], ranks: int) -> Estimate:
    """Predict a step.

    Raises:
        ValueError: the layout does not fit in memory.
    """
    run = predict(composed(*overrides), ranks)
    if run.refused:
        raise ValueError(f"{' '.join(overrides)}: {run.refused}")
    return run


CHARTS: Mapping[str, Callable[[], Chart]] = {
    "tensor": tensor,
    "pipeline": pipeline,
    "micro_batches": micro_batches,
    "chunks": chunks,
    "attention": attention,
}
"""The function that predicts each chart, by the name of its block."""


def images() -> dict[Path, str]:
    """Return the charts."""
    drawings: dict[str, tuple[object, Callable[[], Figure]]] = {
        name: (predicted(), partial(draw_lines, predicted())) for name, predicted in CHARTS.items()
    }
    rows = recomputation()
    drawings["recomputation"] = rows, partial(draw_recomputation, rows)
    return {
        _image(name): chart(_image(name), __file__, json.dumps(data).encode(), draw)
        for name, (data, draw) in drawings.items()
    }


def draw_lines(found: Chart) -> Figure:
    """Draw lines over their setting, whose values are spaced logarithmically."""
    figure, (axes,) = panels((6, 2.8), "predicted percent of the peak")
    for (name, line), colour in zip(found.lines.items(), LINE_COLOURS, strict=False):
        axes.plot(list(line), list(line.values()), marker="o", color=colour, label=name)
    values = sorted({value for line in found.lines.values() for value in line})
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()
    axes.set_xlabel(found.label)
    axes.set_ylim(0, 1.1 * max(max(line.values()) for line in found.lines.values()))
    axes.grid(axis="y")
    axes.legend()
    return figure


def draw_recomputation(rows: Sequence[Recomputation]) -> Figure:
    """Draw speed and memory of models without and with recomputation, with the values."""
    titles = ("tokens/s per GCD (logarithmic)", "memory per GCD, GiB")
    figure, both = panels((8.5, 2.8), *titles, gap=0.25)
    names = [row.model for row in rows]
    for axes, pairs in zip(both, ([r.tokens for r in rows], [r.memory for r in rows]), strict=True):
        kept, recomputed = (dict(enumerate(values)) for values in zip(*pairs, strict=True))
        series = {"kept": (OURS, kept), "recomputed": (NEUTRAL, recomputed)}
        for bars in draw_groups(axes, names, series, (0.4, 0.38)):
            axes.bar_label(bars, fmt="{:g}", padding=2)
        axes.margins(y=0.4)
    both[0].set_yscale("log")
    both[0].yaxis.set_major_formatter(ScalarFormatter())
    both[1].legend(ncols=2)
    return figure


def _block(name: str) -> Iterator[str]:
    yield f"![{name.replace('_', ' ')}](images/{_image(name).name})"
    yield ""
    if name == "recomputation":
        yield _recomputation_sentence(recomputation())
    else:
        yield _sentence(CHARTS[name]())


def _sentence(found: Chart) -> str:
    """Say the first and the last value of each line."""
    parts = []
    for name, line in found.lines.items():
        (first, start), *_, (last, end) = line.items()
        parts.append(f"{start:.1f}% at {first} and {end:.1f}% at {last} ({name})")
    return f"Predicted by {found.label}: " + "; ".join(parts) + "."


def _recomputation_sentence(rows: Sequence[Recomputation]) -> str:
    parts = [
        f"{row.tokens[0] / row.tokens[1]:.2f} times as fast with {row.memory[0]:.1f} instead of "
        f"{row.memory[1]:.1f} GiB ({row.model})"
        for row in rows
    ]
    return "Predicted without recomputation: " + "; ".join(parts) + "."


def _image(name: str) -> Path:
    return IMAGES / f"observations_{name}.svg"


PAGES = {
    "docs/observations.md": {
        "memory": memory_table,
        **{name: partial(_block, name) for name in (*CHARTS, "recomputation")},
    },
}
