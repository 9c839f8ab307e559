"""Predict how the throughput of Frontier's models depends on one setting at a time."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from docs.generate.blocks import table
from docs.generate.predictions import predict, tokens_per_device
from frontier_llm.cli.experiments import composed
from frontier_llm.geometry.host_pool import STATE_BYTES
from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.planner.estimate import Estimate
from frontier_llm.units import GIB

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


def tensor() -> Chart:
    """Vary the tensor size, with the same number of GCDs and of micro-batches per replica."""
    small = {
        size: _percent(
            ("experiment=frontier_1_4b", *ONE_CHUNK, "parallel.pipeline=1", "data.micro_batch=4",
             f"parallel.tensor={size}", f"data.global_batch={8 // size * 4 * 40}"), 8,
        )
        for size in (1, 2, 4, 8)
    }  # fmt: skip
    large = {
        size: _percent(
            ("experiment=frontier_22b", *ONE_CHUNK, f"parallel.tensor={size}",
             f"data.global_batch={16 // size * 256}"), 128,
        )
        for size in (1, 2, 4, 8, 16)
    }  # fmt: skip
    return Chart("tensor size", {"1.4B on 8 GCDs": small, "22B on 128 GCDs, PP 8": large})


def pipeline() -> Chart:
    """Vary the number of stages of one replica, with a fixed batch and with a growing one."""

    def line(batch: Mapping[int, int]) -> dict[int, float]:
        return {
            size: _percent(
                (*OF_175B, f"parallel.pipeline={size}", f"data.global_batch={batch[size]}"),
                4 * size,
            )
            for size in batch
        }

    sizes = (16, 32, 48, 96)
    fixed, grown = dict.fromkeys(sizes, 128), {size: 8 * size for size in sizes}
    return Chart(
        "pipeline size",
        {"128 micro-batches": line(fixed), "8 micro-batches per stage": line(grown)},
    )


def micro_batches() -> Chart:
    """Vary the number of micro-batches of one replica, until the bubble no longer matters."""
    counts = (8, 16, 32, 64, 128, 256, 512, 1024)
    models = {"175B, PP 16": (OF_175B, 64), "1T, PP 64": (OF_1T, 512)}
    return Chart(
        "micro-batches per replica",
        {
            name: {
                count: _percent((*experiment, f"data.global_batch={count}"), ranks)
                for count in counts
            }
            for name, (experiment, ranks) in models.items()
        },
    )


def chunks() -> Chart:
    """Vary the model chunks per stage of an interleaved schedule, with several batches."""
    lines = {}
    for count in (16, 64, 256):
        lines[f"{count} micro-batches"] = {
            size: _percent(
                (*OF_175B, f"parallel.chunks={size}", f"data.global_batch={count}",
                 f"parallel.schedule={'1f1b' if size == 1 else 'interleaved'}"), 64,
            )
            for size in (1, 2, 3, 6)
        }  # fmt: skip
    return Chart("model chunks per stage", lines)


def attention() -> Chart:
    """Vary the sequence length, with and without flash attention."""
    names = {"flash attention": "true", "attention scores in memory": "false"}
    return Chart(
        "sequence length",
        {
            name: {
                length: _percent(
                    ("experiment=frontier_22b", *ONE_CHUNK, f"data.sequence_length={length}",
                     f"planner.engine.fused_attention={value}"), 16,
                )
                for length in (1024, 2048, 4096, 8192)
            }
            for name, value in names.items()
        },
    )  # fmt: skip


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
        tokens = [float(f"{tokens_per_device(run):.3g}") for run in (kept, recomputed)]
        memory = [round(run.peak.total / GIB, 1) for run in (kept, recomputed)]
        rows.append(Recomputation(model, (tokens[0], tokens[1]), (memory[0], memory[1])))
    return rows


def memory_table() -> list[str]:
    """Return the lines of the table of model states."""
    device_bytes = composed("cluster=frontier_mi250x").cluster.device.memory_gib * GIB
    rows = []
    for name in MODELS:
        count = count_parameters(composed(f"model={name}").model, 2048)
        sizes = [count * each for each in (PARAMETER_BYTES, SUM_BYTES, STATE_BYTES)]
        cells = [f"{size / 1e9:,.0f} GB" for size in (*sizes, sum(sizes))]
        devices = -(-sum(sizes) // int(device_bytes))
        rows.append([f"`{name}`", f"{count / 1e9:,.1f}B", *cells, devices])
    head = ("model", "parameters", "parameters, 2 bytes", "gradients, 4 bytes",
            "optimizer states, 12 bytes", "together", "GCDs of 64 GiB")  # fmt: skip
    return list(table(head, rows))


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
