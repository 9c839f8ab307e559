"""Write the tables of measurements into the pages, from benchmarks/results/*.json.

`python -m docs.generate.measured_tables` reports which pages are out of date, and `--write` writes
them. A page shows the most important rows; the JSON files have all rows. Each function that yields
a table yields its lines in Markdown.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from docs.generate import recovery_tables, saved_training_table
from docs.generate.gpu_table import measured
from docs.generate.layout_table import layouts
from docs.generate.marked_page import filled, keep_current
from docs.generate.results import RESULTS, ROOT, Row, load, select
from frontier_llm.cli.options import run_command

DOCS = ROOT / "docs"
AMD, INTEL = "AMD", "Intel"
"""Names of the processors in the results."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables, or report which pages are out of date; return the exit code."""
    return keep_current(__doc__, "docs.generate.measured_tables", arguments, files)


def files() -> dict[Path, str]:
    """Return the content of each page with new tables."""
    return {
        DOCS / page: filled(
            (DOCS / page).read_text(), {name: make() for name, make in tables.items()}
        )
        for page, tables in TABLES.items()
    }


def step() -> Iterator[str]:
    """Yield the times of a training step, compared with plain torch."""
    rows = [
        (row["date"], row["hardware"], row["precision"], f"{row['ours_ms']:.0f} ms",
         f"{row['plain_torch_ms']:.0f} ms", f"{row['ratio']:.3f}",
         _cell(row.get("ours_compiled_ms"), " ms"), _cell(row.get("plain_compiled_ms"), " ms"),
         f"{row['compiled_ratio']:.3f}" if "compiled_ratio" in row else "")
        for row in load("step")["rows"]
    ]  # fmt: skip
    head = ("date", "machine", "precision", "ours", "plain torch", "ratio", "ours compiled",
            "plain torch compiled", "ratio")  # fmt: skip
    yield from _table(head, rows)


def sharding() -> Iterator[str]:
    """Yield the speeds relative to other libraries, with their targets."""
    columns = ((AMD, "fp32"), (AMD, "bf16"), (INTEL, "fp32"), (INTEL, "bf16"))
    found = load("sharding")["ratios"]
    rows = []
    for link, contender, peers in dict.fromkeys(
        (row["link"], row["contender"], tuple(row["over"])) for row in found
    ):
        of_row = select(found, link=link, contender=contender, over=list(peers))
        better = "the better of " if len(peers) > 1 else ""
        name = f"{link}: `{contender}` to {better}" + " and ".join(f"`{peer}`" for peer in peers)
        cells = [
            _ratio(row)
            for processor, precision in columns
            for row in select(of_row, precision=precision)
            if processor in row["hardware"]
        ]
        rows.append((name, of_row[0]["target"], *cells))
    head = (
        "ratio of tokens/s",
        "target",
        "AMD, fp32",
        "AMD, bf16",
        "Intel, fp32",
        "Intel, bf16 (emulated)",
    )
    yield from _table(head, rows)


def library() -> Iterator[str]:
    """Yield the speed of the library and the bytes it sends, compared with FSDP2."""
    rows = [
        (f"{case['ranks']}, {case['precision']}", f"`{row['contender']}`", _spread(row, "step_ms"),
         _spread(row, "speedup"), row["sent_mb"], _cell(row["counted_mb"]))
        for case in load("library")["cases"]
        for row in case["rows"]
    ]  # fmt: skip
    head = ("ranks", "contender", "step, ms", "speed over the faster FSDP2", "sent, MB",
            "counted, MB")  # fmt: skip
    yield from _table(head, rows)


def library_saves() -> Iterator[str]:
    """Yield for how long saves block the loop, with the library and with torch."""
    rows = [
        (f"`{row['saver']}`", _spread(row, "blocked_ms"), _spread(row, "slowdown"), row["added_ms"])
        for row in load("library")["saves"]["rows"]
    ]
    yield from _table(("saver", "blocked, ms per step", "slowdown", "added, ms per step"), rows)


def optimizers() -> Iterator[str]:
    """Yield the best run of each optimizer."""
    rows = [
        (f"`{row['optimizer']}`", row["rate"], row["loss"], row["steps"], row["bytes"])
        for row in load("optimizers")["rows"]
    ]
    head = ("optimizer", "best rate", "last validation loss", "steps to AdamW's last loss",
            "bytes per parameter besides master weights")  # fmt: skip
    yield from _table(head, rows)


def pipeline() -> Iterator[str]:
    """Yield the times of pipeline schedules relative to our 1F1B, in every case."""
    found = load("pipeline")
    cases = found["cases"]
    names = max(([row["contender"] for row in case["rows"]] for case in cases), key=len)
    rows = [
        (f"`{name}`",
         *(", ".join(f"{row['over_1f1b']:.3f}" for row in select(case["rows"], contender=name))
           for case in cases))
        for name in names
    ]  # fmt: skip
    head = [f"{case['ranks']} ranks, {case['micro_batches']} micro-batches" for case in cases]
    yield from _table(("time over `1f1b`", *head), rows)
    yield ""
    yield (
        f"Measured on {found['cores']} cores of an {found['processor']} ({found['date']}, torch "
        f"{found['torch']}), with samples of {found['sizes']['sequence']} tokens, a width of "
        f"{found['sizes']['hidden']}, {found['rounds']} rounds, and `--waiting "
        f"{found['waiting']}`."
    )


def pipeline_memory() -> Iterator[str]:
    """Yield measured and planned memory with and without recomputation, in the same case."""
    plain, recomputed = load("pipeline")["cases"], load("pipeline_recompute")["cases"]
    (with_recompute,) = recomputed
    numbers = {key: with_recompute[key] for key in ("ranks", "micro_batches")}
    (without,) = select(plain, **numbers)
    rows = [
        (f"`{row['contender']}`", *(
            f"{one[key] / 2**20:.1f}"
            for one in (row, *select(with_recompute["rows"], contender=row["contender"]))
            for key in ("peak_bytes", "planned_bytes")
        ))
        for row in without["rows"]
    ]  # fmt: skip
    head = ("peak of activations, MiB", "measured", "planned", "measured, `recompute=full`",
            "planned, `recompute=full`")  # fmt: skip
    yield from _table(head, rows)


def checkpoint() -> Iterator[str]:
    """Yield the comparison of ways to save a checkpoint."""
    shown = ("ours-lazy", "ours-blocking", "torch.save-fsync", "dcp-async-stager", "bare-writes")
    keys = ("blocked_ms", "durable_s", "compute_meanwhile", "long_step", "short_steps", "restore_s")
    by_saver = {row["saver"]: row for row in load("checkpoint")["rows"]}
    rows = [
        (f"`{name}`", *(_cell(by_saver[name][key]) for key in keys),
         _cell(by_saver[name]["of_disk_percent"], "%"))
        for name in shown
    ]  # fmt: skip
    head = ("saver", "blocked, ms", "durable after, s", "compute meanwhile", "long step",
            "short steps", "restore, s", "of the disk's rate")  # fmt: skip
    yield from _table(head, rows)


def kernels() -> Iterator[str]:
    """Yield the speeds of the quantisation kernels."""
    keys = ("quantise", "dequantise", "add_to_fp32")
    found = load("quantisation_kernels")["rows"]
    names = dict.fromkeys((row["kernels"], row["format"]) for row in found)
    rows = []
    for name, form in names:
        cells = [
            _cell(row[key])
            for unquantised in ("fp32", "bf16")
            for row in select(found, kernels=name, format=form, wide=unquantised)
            for key in keys
        ]
        rows.append((name, form or "-", *cells))
    head = ("kernels", "format", "fp32: quantise", "fp32: dequantise", "fp32: add to fp32",
            "bf16: quantise", "bf16: dequantise", "bf16: add to fp32")  # fmt: skip
    yield from _table(head, rows)


def quantised_step() -> Iterator[str]:
    """Yield the ratios of whole steps with quantised communication."""
    columns = (
        ("2 x 1", "1 Gbit/s", AMD), ("2 x 1", "1 Gbit/s", INTEL), ("2 x 2", "1 Gbit/s", AMD),
        ("2 x 2", "1 Gbit/s", INTEL), ("2 x 1", "200 Mbit/s", AMD), ("2 x 1", "200 Mbit/s", INTEL),
    )  # fmt: skip
    found = load("quantised_step")["rows"]
    rows = []
    for comparison in dict.fromkeys(row["what"] for row in found):
        of_comparison = select(found, what=comparison)
        target = next((row["target"] for row in of_comparison if row["target"]), None)
        cells = [
            ", ".join(
                f"{row['ratio']:.{row['decimals']}f}"
                for row in select(of_comparison, nodes_x_ranks=grid, link=link, processor=cpu)
            )
            for grid, link, cpu in columns
        ]
        rows.append((comparison, _cell(target), *cells))
    head = (
        "ratio of tokens/s", "target", "2 x 1, AMD: fp32, bf16", "2 x 1, Intel: fp32",
        "2 x 2, AMD: fp32, bf16", "2 x 2, Intel: fp32", "2 x 1, 200 Mbit/s, AMD: fp32, bf16",
        "2 x 1, 200 Mbit/s, Intel: fp32",
    )  # fmt: skip
    yield from _table(head, rows)


def zeropp_parts() -> Iterator[str]:
    """Yield what each part of ZeRO++ saves on simulated links."""
    links = ("200 Mbit/s", "1 Gbit/s")
    found = load("zeropp_parts")["rows"]
    rows = []
    for parts in dict.fromkeys(row["parts"] for row in found):
        first, second = (select(found, parts=parts, link=link)[0] for link in links)
        overrides = f"`sharding={first['sharding']} collectives={first['collectives']}`"
        cells = [
            cell
            for row in (first, second)
            for cell in (f"{row['tokens_per_second']:.0f}", f"{row['ratio']:.2f}x")
        ]
        rows.append((parts, overrides, f"{first['sent_mb']:.1f}", *cells))
    head = ("parts", "overrides", "sent between nodes per rank, MB")
    of_links = [name for link in links for name in (f"tokens/s, {link}", "speed-up")]
    yield from _table((*head, *of_links), rows)


def preprocess() -> Iterator[str]:
    """Yield the comparison of tokenizing a corpus."""
    rows = [
        (row["contender"], row["seconds"], f"{row['of_ours']:.2f}", row["cpu_seconds"],
         f"{row['tokens_per_second'] / 1e6:.2f}M", row["peak_mib"])
        for row in load("preprocess")["rows"]
    ]  # fmt: skip
    head = ("contender", "seconds", "relative to ours", "CPU seconds", "tokens/s", "peak MiB")
    yield from _table(head, rows)


def kills() -> Iterator[str]:
    """Yield the numbers of kills by moment, and their consequences."""
    found = load("kills")
    rows: list[tuple[object, ...]] = [(row["moment"], row["kills"]) for row in found["rows"]]
    yield from _table(("moment of the kill", "kills"), rows)
    yield ""
    yield (
        f"After these kills: {found['resumes']} resumes from a checkpoint, "
        f"{found['lost_commits']} lost commits, {found['losses_that_differ']} losses that differ "
        f"in a bit from those of an undisturbed run ({found['steps_compared']:,} steps compared), "
        f"and at most {found['most_seconds_to_end']} s from a kill to the end of all processes "
        f"({found['date']}, {found['hardware']}; `{found['command']}`)."
    )


def faults() -> Iterator[str]:
    """Yield the consequences of every fault."""
    rows = [
        (row["fault"], row["nodes_free_after"], row["job"], row["first_new_step_after"],
         row["steps_done_twice"],
         f"`{row['culprit']}`" if row["culprit"] else "none expected",
         f"{row['largest_loss_difference']:.2g}")
        for row in load("faults")["rows"]
    ]  # fmt: skip
    head = ("what happened", "nodes free after", "the job", "first step after restart",
            "steps done twice", "log names the cause as",
            "largest difference of the loss")  # fmt: skip
    yield from _table(head, rows)


def elastic() -> Iterator[str]:
    """Yield the parts of a run that continued on other numbers of ranks."""
    rows = [
        (row["ranks"], row["micro_batch"], row["steps"],
         "all" if row["samples_as_undisturbed"] else "no", f"{row['largest_loss_difference']:.2g}")
        for row in load("elastic")["rows"]
    ]  # fmt: skip
    head = ("ranks", "micro-batch", "steps", "same samples as without stops",
            "largest difference of the loss")  # fmt: skip
    yield from _table(head, rows)


def starts() -> Iterator[str]:
    """Yield the seconds of a start-up, and the store operations of a rank."""
    found = load("starts")
    seconds = [(row["ranks"], row["seconds"]) for row in found["seconds"]]
    yield from _table(("ranks", "seconds to the end of the first step"), seconds)
    yield ""
    operations = [
        (row["ranks"], row["last_rank"], row["rank_0"], row["collectives"])
        for row in found["operations"]
    ]
    head = (
        "ranks",
        "store operations of the last rank",
        "store operations of rank 0",
        "collectives per rank",
    )
    yield from _table(head, operations)


def gpu() -> Iterator[str]:
    """Yield the results of `make gpu`, or that there are none."""
    yield from measured(load("gpu") if (RESULTS / "gpu.json").exists() else None)


def _saved_training(table: Callable[[Row], Iterator[str]]) -> Iterator[str]:
    """Yield a table of savers that are compared inside training."""
    yield from table(load("saved_training"))


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(map(str, row)) + " |"


def _ratio(row: Row) -> str:
    """Return a ratio with the smallest and the largest of the rounds, if these are known."""
    spread = f" ({row['least']:.2f}, {row['most']:.2f})" if row["least"] else ""
    return f"{row['ratio']:.2f}{spread}"


def _spread(row: Row, key: str) -> str:
    """Return a median with the smallest and the largest of the rounds."""
    median, least, most = row[key]
    return f"{median} ({least}, {most})"


def _cell(value: Any, unit: str = "") -> str:
    """Return a value with its unit; nothing if it was not measured."""
    return "" if value is None else f"{value}{unit}"


TABLES: Mapping[str, Mapping[str, Callable[[], Iterator[str]]]] = {
    "benchmarks.md": {
        "step": step, "sharding": sharding, "library": library, "library saves": library_saves,
        "pipeline": pipeline, "pipeline memory": pipeline_memory,
        "checkpoint": checkpoint,
        "saved every step": partial(_saved_training, saved_training_table.every_step),
        "saved targets": partial(_saved_training, saved_training_table.targets),
    },
    "collectives.md": {
        "kernels": kernels, "quantised step": quantised_step,
        "zeropp parts measured": zeropp_parts,
    },
    "data.md": {"preprocess": preprocess},
    "planner.md": {"layouts": lambda: layouts(load("planner_layouts"))},
    "gpu.md": {"measured": gpu},
    "optimizer.md": {"optimizers": optimizers},
    "checkpoint.md": {"kills": kills},
    "recovery.md": recovery_tables.TABLES,
    "reliability.md": {"faults": faults, "elastic": elastic, "starts": starts},
}  # fmt: skip
"""For each page: the names in its markers, and the functions that yield the tables."""

if __name__ == "__main__":
    sys.exit(run_command(main))
