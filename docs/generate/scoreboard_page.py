"""The tables of docs/scoreboard.md: published figures beside predicted and measured ones."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple

from benchmarks.planner_accuracy import TABLES, left_out
from docs.generate.blocks import load, select, table
from docs.generate.planner_page import AMSP_PAPER_FACTORS, CURVES, scaling
from docs.generate.predictions import BF16_GRADIENTS, predict, with_factors, with_network
from frontier_llm.cli.experiments import composed
from frontier_llm.config import RunConfig
from frontier_llm.geometry.host_pool import STATE_BYTES
from frontier_llm.geometry.inventory import count_parameters

HEAD = ("quantity", "published", "predicted", "error", "measured here", "seen by the fit", "note")
AMSP_OVERLAP = {
    "7b": ((3525, 2812), (4503, 4286)),
    "13b": ((1918, 1527), (2230, 1666)),
    "30b": ((825, 557), (880, 719)),
}
"""Tokens per second and GPU on 64 GPUs (arXiv:2311.00257), by model: for 1 and for 8 micro-batches,
with and without overlap."""
AMSP_GAINS = {"7b": (1.3, 8), "13b": (1.1, 8), "30b": (1.13, 16)}
"""Speed of AMSP's factors over MiCS' on 1024 GPUs in the same program, and the ranks over which
MiCS divides all states, by model."""
ZEROPP_NODE_GBITS = {"100 Gbit/s": (100, "about 2x"), "400 Gbit/s": (400, "1.24x to 1.36x")}
"""Network of a node, and the published speed-up of ZeRO++ over ZeRO-3, for several models."""
DATASTATES_GB = {"3b": 42, "7b": 98, "13b": 182, "30b": 420, "70b": 980}
"""Size of a checkpoint with 14 bytes per parameter (arXiv:2406.10707), GB, by model."""


class Figure(NamedTuple):
    """A published figure; cells that do not apply are empty."""

    quantity: str
    published: str
    predicted: str = ""
    error: str = ""
    measured: str = ""
    seen: str = ""
    note: str = ""


def _table(*parts: Callable[[], Iterable[Figure]]) -> Iterator[str]:
    """Yield the lines of a table, without the columns that are empty in all rows."""
    figures = list(chain.from_iterable(part() for part in parts))
    used = [i for i in range(len(HEAD)) if any(figure[i] for figure in figures)]
    yield from table([HEAD[i] for i in used], ([figure[i] for i in used] for figure in figures))


def _compared(
    quantity: str, published: float, predicted: float, unit: str, digits: int = 0, **cells: str
) -> Figure:
    """Return a published number with its prediction and the error."""
    found, error = f"{predicted:.{digits}f}{unit}", f"{predicted / published - 1:+.1%}"
    return Figure(quantity, f"{published}{unit}", found, error, **cells)


def _runs(name: str) -> Iterator[Figure]:
    """Yield the runs of a table, predicted with constants that were fitted without it."""
    seen = "" if TABLES[name].fits else TABLES[name].note
    for found in left_out(name):
        was, predicted = (f"{value:.1f} TFLOP/s" for value in (found.run.measured, found.predicted))
        yield Figure(found.run.label, was, predicted, f"{found.error:+.1%}", seen=seen)


def _scaling() -> Iterator[Figure]:
    """Yield the efficiencies of the largest runs on Frontier, in weak and in strong scaling."""
    for model, curves in CURVES.items():
        _, last = scaling(curves.ends)
        for name, was, found in zip(
            ("weak", "strong"), curves.published_percent, last.efficiencies, strict=True
        ):
            yield Figure(
                f"{name} scaling of {model} to {last.ranks} GCDs",
                f"{was}%",
                f"{found:.0%}",
                f"{round(100 * found) - was:+d} points",
                seen="micro-batch" if name == "strong" else "",
            )


def _amsp_gains() -> Iterator[Figure]:
    for model, (published, mics) in AMSP_GAINS.items():
        config = _amsp(model)
        ours, theirs = (
            predict(with_factors(config, factors), 1024).time.seconds
            for factors in (AMSP_PAPER_FACTORS[model], (mics, mics, mics))
        )
        name = f"{model.upper()}: AMSP's factors over MiCS', 1024 GPUs"
        yield _compared(name, published, theirs / ours, "x", 2, seen="absolute speeds")


def _amsp_overlap() -> Iterator[Figure]:
    for model, by_batch in AMSP_OVERLAP.items():
        for micro_batches, by_overlap in zip((1, 8), by_batch, strict=True):
            for overlaps, published in zip((True, False), by_overlap, strict=True):
                config = _amsp(
                    model,
                    f"data.global_batch={64 * micro_batches}",
                    f"planner.engine.overlaps={str(overlaps).lower()}",
                )
                noun = "micro-batch" if micro_batches == 1 else "micro-batches"
                how = "with" if overlaps else "without"
                note = ""
                if config.recompute != "none":  # as the paper reports for 30B
                    other = _tokens(config.model_copy(update={"recompute": "none"}), model)
                    note = f"{other:.0f} tokens/s without recomputation"
                yield _compared(
                    f"{model.upper()} on 64 GPUs, {micro_batches} {noun}, {how} overlap",
                    published, _tokens(config, model), " tokens/s",
                    seen="`hidden_share`" if model == "7b" else "", note=note,
                )  # fmt: skip


def _tokens(config: RunConfig, model: str) -> float:
    """Return the predicted tokens per second and GPU with AMSP's factors on 64 GPUs."""
    return predict(with_factors(config, AMSP_PAPER_FACTORS[model]), 64).tokens_per_device


def _amsp(model: str, *overrides: str) -> RunConfig:
    return composed(f"experiment=amsp_llama_{model}", "planner.engine=internevo", *overrides)


def _zeropp() -> Iterator[Figure]:
    rows = load("wire_bytes")["rows"]
    same = {"nodes_x_ranks": "2 x 2", "precision": "bf16", "micro_batches": 1}
    (plain,) = select(rows, **same, sharding="zero3", collectives="plain")
    (ours,) = select(rows, **same, sharding="zeropp", collectives="zeropp")
    yield Figure(
        "bytes between nodes per micro-batch, ZeRO-3 over ZeRO++",
        "4x",
        measured=f"{plain['interface_mb'] / ours['interface_mb']:.1f}x",
        note="two nodes of two ranks; gradients are summed inside a node first: "
        "`python -m benchmarks.bench_sharding`",
    )
    yield _zeropp_gain("18B on 384 V100", "2.16x", None)
    for link, (gbits, published) in ZEROPP_NODE_GBITS.items():
        yield _zeropp_gain(f"18B, network of {link} per node", published, gbits)
    curves = load("convergence")["curves"]
    last = {
        name: [row["validation"][-1][1] for row in select(curves, run=name)]
        for name in ("plain", "zeropp")
    }
    losses = {name: sum(values) / len(values) for name, values in last.items()}
    yield Figure(
        "loss with all three quantisations over the loss without",
        f"{2.1656 / 2.1218:.4f}",
        measured=f"{losses['zeropp'] / losses['plain']:.4f}",
        note="published for a GPT of 350M; measured on `gpt_tiny`, 1000 steps, mean of 2 seeds: "
        "`python -m benchmarks.convergence`",
    )


def _zeropp_gain(what: str, published: str, node_gbits: float | None) -> Figure:
    """Return the predicted speed-up of ZeRO++ over ZeRO-3, on a network of a given rate."""
    plain = with_network(composed("experiment=zeropp_18b", "sharding=zero3", "collectives=plain"),
                          node_gbits)  # fmt: skip
    ours = with_network(composed("experiment=zeropp_18b"), node_gbits)
    seconds = [predict(config, 384).time.seconds for config in (plain, ours)]
    predicted = seconds[0] / seconds[1]
    error = f"{predicted / 2.16 - 1:+.1%}" if node_gbits is None else ""
    what = f"{what}: ZeRO++ over ZeRO-3"
    return Figure(what, published, f"{predicted:.2f}x", error, note="our formats and batch")


def _datastates() -> Iterator[Figure]:
    for model, published in DATASTATES_GB.items():
        config = composed(f"experiment=datastates_{model}")
        parameters = count_parameters(config.model, config.data.sequence_length)
        predicted = STATE_BYTES * parameters / 1e9
        yield _compared(f"size of a checkpoint, {model.upper()}", published, predicted, " GB")
    rows = {row["saver"]: row for row in load("checkpoint")["rows"]}
    lazy, blocking = rows["ours-lazy"], rows["torch.save"]
    command = "`python -m benchmarks.bench_checkpoint`, two CPU ranks"
    yield Figure(
        "time that training is blocked, torch.save over lazy",
        "up to 48x",
        measured=f"{blocking['blocked_ms'] / lazy['blocked_ms']:.0f}x",
        note=command + "; memory is copied during the step, so only the start is waited for",
    )
    yield Figure(
        "time of short steps with a checkpoint each, torch.save over lazy",
        "up to 2.2x",
        measured=f"{blocking['short_steps'] / lazy['short_steps']:.2f}x",
        note=command + "; torch.save does not wait until the data are on the disk",
    )


def _mt5() -> Iterator[Figure]:
    seconds = {nodes: [_mt5_seconds(nodes, stage) for stage in (2, 3)] for nodes in (2, 4, 8)}
    predicted = ", ".join(f"{two:.2f} s, {three:.2f} s" for two, three in seconds.values())
    holds = all(two < three for two, three in seconds.values())
    yield Figure(
        "13B: ZeRO-2 takes less time per step than ZeRO-3 on 2, 4 and 8 nodes",
        "yes",
        ("yes: " if holds else "no: ") + predicted,
        note="the study's seconds are not published",
    )


def _mt5_seconds(nodes: int, stage: int) -> float:
    """Predict a step with a ZeRO stage on nodes of 8 A100, with 8 samples per GPU."""
    config = composed(
        "model=mt5_xxl", "data=stdlib_spans", "cluster=a100_80g", "precision=bf16",
        f"sharding=zero{stage}", "parallel.pipeline=1", "recompute=full",
        "data.sequence_length=1024", "data.micro_batch=8", f"data.global_batch={8 * 8 * nodes}",
        BF16_GRADIENTS,
    )  # fmt: skip
    return predict(config, 8 * nodes).time.seconds


BLOCKS: dict[str, tuple[Callable[[], Iterable[Figure]], ...]] = {
    "megatron": (partial(_runs, "megatron_sc21"), partial(_runs, "megatron_sc21_unused")),
    "frontier": (partial(_runs, "frontier"), _scaling),
    "amsp": (partial(_runs, "amsp"), partial(_runs, "amsp_zero3"), _amsp_gains, _amsp_overlap),
    "zeropp": (_zeropp,),
    "datastates": (_datastates,),
    "mt5": (_mt5,),
}
"""The figures of each block."""
PAGES = {
    "docs/scoreboard.md": {name: partial(_table, *parts) for name, parts in BLOCKS.items()},
}
