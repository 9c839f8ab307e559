"""The tables of measurements, from benchmarks/results/*.json.

A page shows the most important rows; the JSON files have all rows. `PAGES` says for each block
which file it shows, and its columns.
"""

import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from docs.generate.blocks import DOCS, RESULTS, Row, filled, load, select, table

Cell = str | Callable[[Row], object]
"""A format string for the keys of a row, or a function of the row."""
AMD, INTEL = "AMD", "Intel"
PREDICTED = {"cost": "1", "copies": "1.04"}
"""Ratios that the docstring of benchmarks/bench_recovery.py derives."""
SPREAD = "{%(key)s[0]} ({%(key)s[1]}, {%(key)s[2]})"
NOTHING = (
    "**Nothing on this page has been measured on a GPU.** The tests below show that the code is "
    "correct as far as this can",
    "be shown without one. They do not show how fast it is.",
)


@dataclass(frozen=True)
class Table:
    """A table with one line for each row of a file of benchmarks/results."""

    source: str
    columns: Mapping[str, Cell]
    """Cells by the heading of their column."""
    rows: Callable[[Mapping[str, Any]], Iterable[Row]] = lambda content: content["rows"]
    after: str = ""
    """Format string for the keys of the file: a line below the table."""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the block."""
        content = load(self.source)
        cells = ([_cell(form, row) for form in self.columns.values()] for row in self.rows(content))
        yield from table(list(self.columns), cells)
        if self.after:
            yield ""
            yield self.after.format_map(content)


class _Cells(string.Formatter):
    """Formats cells; a cell with a value that was not measured is empty."""

    def format_field(self, value: Any, spec: str) -> str:
        if value is None:
            raise LookupError(spec)
        return str(super().format_field(value, spec))


def _cell(form: Cell, row: Row) -> str:
    if not isinstance(form, str):
        return str(form(row))
    try:
        return _Cells().vformat(form, (), row)
    except LookupError:
        return ""


def _spread(key: str) -> str:
    """Return the format of a median with the smallest and the largest of the rounds."""
    return SPREAD % {"key": key}


def _span(values: Row, form: str) -> str:
    """Return a median with the smallest and the largest of the rounds, from their names."""
    middle, least, most = (format(values[key], form) for key in ("median", "min", "max"))
    return f"{middle} ({least}, {most})"


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
            f"{row['ratio']:.2f}"
            + (f" ({row['least']:.2f}, {row['most']:.2f})" if row["least"] else "")
            for processor, precision in columns
            for row in select(of_row, precision=precision)
            if processor in row["hardware"]
        ]
        rows.append((name, of_row[0]["target"], *cells))
    yield from table(
        ("ratio of tokens/s", "target", "AMD, fp32", "AMD, bf16", "Intel, fp32",
         "Intel, bf16 (emulated)"), rows,
    )  # fmt: skip


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
    yield from table(("time over `1f1b`", *head), rows)
    yield ""
    yield (
        "Measured on {cores} cores of an {processor} ({date}, torch {torch}), with samples of "
        "{sizes[sequence]} tokens, a width of {sizes[hidden]}, {rounds} rounds, and `--waiting "
        "{waiting}`."
    ).format_map(found)


def pipeline_memory() -> Iterator[str]:
    """Yield measured and planned memory with and without recomputation, in the same case."""
    (recomputed,) = load("pipeline_recompute")["cases"]
    numbers = {key: recomputed[key] for key in ("ranks", "micro_batches")}
    (plain,) = select(load("pipeline")["cases"], **numbers)
    rows = [
        (f"`{row['contender']}`", *(
            f"{one[key] / 2**20:.1f}"
            for one in (row, *select(recomputed["rows"], contender=row["contender"]))
            for key in ("peak_bytes", "planned_bytes")
        ))
        for row in plain["rows"]
    ]  # fmt: skip
    head = ("peak of activations, MiB", "measured", "planned", "measured, `recompute=full`",
            "planned, `recompute=full`")  # fmt: skip
    yield from table(head, rows)


def kernels() -> Iterator[str]:
    """Yield the speeds of the quantisation kernels."""
    keys = ("quantise", "dequantise", "add_to_fp32")
    found = load("quantisation_kernels")["rows"]
    rows = [
        (name, form or "-", *(
            _cell(f"{{{key}}}", row)
            for wide in ("fp32", "bf16")
            for row in select(found, kernels=name, format=form, wide=wide)
            for key in keys
        ))
        for name, form in dict.fromkeys((row["kernels"], row["format"]) for row in found)
    ]  # fmt: skip
    head = [f"{wide}: {key}" for wide in ("fp32", "bf16") for key in keys]
    yield from table(["kernels", "format", *(name.replace("_", " ") for name in head)], rows)


def quantised_step() -> Iterator[str]:
    """Yield the ratios of whole steps with quantised communication."""
    columns = {
        "2 x 1, AMD: fp32, bf16": ("2 x 1", "1 Gbit/s", AMD),
        "2 x 1, Intel: fp32": ("2 x 1", "1 Gbit/s", INTEL),
        "2 x 2, AMD: fp32, bf16": ("2 x 2", "1 Gbit/s", AMD),
        "2 x 2, Intel: fp32": ("2 x 2", "1 Gbit/s", INTEL),
        "2 x 1, 200 Mbit/s, AMD: fp32, bf16": ("2 x 1", "200 Mbit/s", AMD),
        "2 x 1, 200 Mbit/s, Intel: fp32": ("2 x 1", "200 Mbit/s", INTEL),
    }
    found = load("quantised_step")["rows"]
    rows = []
    for comparison in dict.fromkeys(row["what"] for row in found):
        of_comparison = select(found, what=comparison)
        target = next((row["target"] for row in of_comparison if row["target"]), "")
        cells = [
            ", ".join(
                f"{row['ratio']:.{row['decimals']}f}"
                for row in select(of_comparison, nodes_x_ranks=grid, link=link, processor=cpu)
            )
            for grid, link, cpu in columns.values()
        ]
        rows.append((comparison, target, *cells))
    yield from table(("ratio of tokens/s", "target", *columns), rows)


def zeropp_parts() -> Iterator[str]:
    """Yield what each part of ZeRO++ saves on simulated links."""
    links = ("200 Mbit/s", "1 Gbit/s")
    found = load("zeropp_parts")["rows"]
    rows = []
    for parts in dict.fromkeys(row["parts"] for row in found):
        of_parts = [select(found, parts=parts, link=link)[0] for link in links]
        first = of_parts[0]
        overrides = f"`sharding={first['sharding']} collectives={first['collectives']}`"
        cells = [
            cell
            for row in of_parts
            for cell in (f"{row['tokens_per_second']:.0f}", f"{row['ratio']:.2f}x")
        ]
        rows.append((parts, overrides, f"{first['sent_mb']:.1f}", *cells))
    head = ("parts", "overrides", "sent between nodes per rank, MB")
    of_links = [name for link in links for name in (f"tokens/s, {link}", "speed-up")]
    yield from table((*head, *of_links), rows)


def layouts() -> Iterator[str]:
    """Yield planned and measured layouts of CPU ranks."""
    found = load("planner_layouts")
    rows = found["rows"]
    time, memory = (fmean(abs(row[key]) for row in rows) for key in ("time_error", "memory_error"))
    cells = [
        (row["layout"], f"{row['planned_seconds'] * 1e3:.0f}", f"{row['seconds'] * 1e3:.0f}",
         f"{row['time_error']:+.1%}", f"{row['planned_bytes'] / 2**20:.1f}",
         f"{row['peak_bytes'] / 2**20:.1f}", f"{row['memory_error']:+.1%}")
        for row in rows
    ]  # fmt: skip
    lines = list(
        table(("layout", "planned, ms", "measured, ms", "error", "planned, MiB", "measured, MiB",
               "error"), cells)
    )  # fmt: skip
    yield from lines
    yield f"| mean of absolute errors | | | {time:.1%} | | | {memory:.1%} |"
    yield ""
    yield (
        "Measured on {cores} cores of an {processor} ({date}, torch {torch}), with a GPT of "
        "{sizes[layers]} layers and a width of {sizes[hidden]}, samples of {sizes[sequence]} "
        "tokens and {sizes[batch]} samples per step; "
    ).format_map(found) + f"{found['rounds'] * found['steps']} timed steps per layout."
    disturbed = [row["layout"] for row in rows if row["is_disturbed"]]
    if disturbed:
        yield f"Other programs ran during all steps of {', '.join(disturbed)}."


def saved_every_step() -> Iterator[str]:
    """Yield savers inside training, with a save after every step, for all numbers of ranks."""
    rows: list[Sequence[object]] = []
    for case in load("saved_training")["cases"]:
        ranks = case["ranks"]
        rows.append((ranks, "no saves", "", _span(case["plain_ms"], ".0f"), "", ""))
        rows += [
            (ranks, f"`{row['saver']}`", _span(row["blocked_ms"], ".1f"),
             _span(row["end_to_end_ms"], ".0f"), _span(row["slowdown"], ".2f"),
             f"{row['bound_ms']:.0f}")
            for row in _every_step(case)["rows"]
        ]  # fmt: skip
    yield from table(
        ("ranks", "saver", "blocked, ms per save", "end to end, ms per step", "slowdown",
         "lower bound, ms per step"), rows,
    )  # fmt: skip


def saved_targets() -> Iterator[str]:
    """Yield the targets with a save after every step, and the machine and its load."""
    found = load("saved_training")
    cases, rows = found["cases"], []
    for case in cases:
        for target in _every_step(case)["targets"]:
            bound, met = target["ratio_of_bounds"], "met" if target["is_met"] else "missed"
            part, _, savers = target["name"].partition(", ")
            one, _, other = savers.partition(" over ")
            # four digits, so that a target that is just missed differs from the ratio
            rows.append(
                (case["ranks"], f"{part}, `{one}` over `{other}`", f"{target['target']:.3g}",
                 _span(target["ratio"], ".4g"), "" if bound is None else f"{bound:.2f}", met)
            )  # fmt: skip
    yield from table(
        ("ranks", "ratio", "target", "measured", "ratio of the lower bounds", ""), rows
    )
    yield ""
    rounds, ranks = (", ".join(str(case[key]) for case in cases) for key in ("rounds", "ranks"))
    others = [v for case in cases for values in case["other_cores"].values() for v in values]
    yield (
        "Measured on {cores} cores of an {processor} ({date}, torch {torch}; `{command}`): "
    ).format_map(found) + (
        f"{rounds} rounds for {ranks} ranks. Other programs used {min(others):.1f} to "
        f"{max(others):.1f} cores meanwhile, {fmean(others):.1f} on average."
    )


def _every_step(case: Row) -> Row:
    """Return the comparison of a case with a save after every step."""
    (comparison,) = select(case["comparisons"], every=1)
    return comparison


def starts() -> Iterator[str]:
    """Yield the seconds of a start-up, and the store operations of a rank."""
    found = load("starts")
    seconds = [(row["ranks"], row["seconds"]) for row in found["seconds"]]
    yield from table(("ranks", "seconds to the end of the first step"), seconds)
    yield ""
    head = ("ranks", "store operations of the last rank", "store operations of rank 0",
            "collectives per rank")  # fmt: skip
    keys = ("ranks", "last_rank", "rank_0", "collectives")
    yield from table(head, ([row[key] for key in keys] for row in found["operations"]))


def deaths() -> Iterator[str]:
    """Yield the outcome of the kills of ranks and of nodes."""
    rows = []
    for series in load("recovery")["deaths"]:
        seconds = sorted(series["seconds"])
        times = (median(seconds), seconds[int(0.95 * len(seconds))], seconds[-1])
        rows.append(
            (series["name"], series["processes_killed"], series["steps_compared"],
             len(series["problems"]), *(f"{value:.2f} s" for value in times))
        )  # fmt: skip
    yield from table(
        ("killed", "processes", "steps", "differences", "to the next step, median", "95%",
         "worst"), rows,
    )  # fmt: skip


def cost() -> Iterator[str]:
    """Yield the ratios of step times, and the effective training time."""
    results = load("recovery")
    names = {
        "cost": "step time with `recovery.enabled` over without",
        "copies": "step time with `recovery.partner_copies` over without, 113 MB per rank",
    }
    rows = []
    for part, name in names.items():
        ratios = sorted(results[part]["ratios"])
        spread = f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        rows.append((name, spread, PREDICTED[part]))
    found = results["goodput"]
    name = f"effective training time, {found['kills']} kills, {found['mtbf']:.0f} s apart"
    rows.append((name, f"{found['measured']:.3f}", f"{found['predicted']:.3f}"))
    yield from table(("figure", "measured", "predicted"), rows)


def gpu() -> Iterator[str]:
    """Yield the results of `make gpu`, or that there are none."""
    yield from gpu_section(load("gpu") if (RESULTS / "gpu.json").exists() else None)


def gpu_section(results: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the lines of the section with results as benchmarks/gpu.py writes them."""
    if not results or not results["slices"]:
        yield from NOTHING
        return
    slices = results["slices"]
    dates = sorted({result["date"] for result in slices.values()})
    yield f"Measured on {results['hardware']}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))},"
    yield f"by `{results['command']}`. A slice that is not in the table was not run."
    yield ""
    done = [
        (name, result["checks"], (result["error"] and f"failed: {result['error']}") or "passed",
         result["seconds"])
        for name, result in slices.items()
    ]  # fmt: skip
    yield from table(("slice", "what it does", "result", "seconds"), map(_flat, done))
    yield ""
    rows = [(name, row["what"], row["value"]) for name, r in slices.items() for row in r["rows"]]
    yield from table(("slice", "measured", "value"), map(_flat, rows))


def _flat(cells: Iterable[object]) -> list[str]:
    """Return the cells without line breaks and bars, which would end a cell."""
    return [" ".join(str(cell).replace("|", "/").split()) for cell in cells]


def _compiled_cases(content: Row) -> Iterator[Row]:
    for case in content["cases"]:
        yield from ({**case, **row} for row in case["rows"])


def _of_savers(*names: str) -> Callable[[Row], Iterable[Row]]:
    return lambda content: [select(content["rows"], saver=name)[0] for name in names]


PAGES: Mapping[str, Mapping[str, Table | Callable[[], Iterator[str]]]] = {
    "benchmarks.md": {
        "step": Table("step", {
            "date": "{date}", "machine": "{hardware}", "precision": "{precision}",
            "ours": "{ours_ms:.0f} ms", "plain torch": "{plain_torch_ms:.0f} ms",
            "ratio": "{ratio:.3f}", "ours compiled": "{ours_compiled_ms} ms",
            "plain torch compiled": "{plain_compiled_ms} ms",
            "ratio, compiled": "{compiled_ratio:.3f}",
        }),
        "sharding": sharding,
        "library": Table("library", {
            "ranks": "{ranks}, {precision}", "contender": "`{contender}`",
            "step, ms": _spread("step_ms"), "speed over the faster FSDP2": _spread("speedup"),
            "sent, MB": "{sent_mb}", "counted, MB": "{counted_mb}",
        }, rows=_compiled_cases),
        "library saves": Table("library", {
            "saver": "`{saver}`", "blocked, ms per step": _spread("blocked_ms"),
            "slowdown": _spread("slowdown"), "added, ms per step": "{added_ms}",
        }, rows=lambda content: content["saves"]["rows"]),
        "pipeline": pipeline,
        "pipeline memory": pipeline_memory,
        "checkpoint": Table("checkpoint", {
            "saver": "`{saver}`", "blocked, ms": "{blocked_ms}", "durable after, s": "{durable_s}",
            "compute meanwhile": "{compute_meanwhile}", "long step": "{long_step}",
            "short steps": "{short_steps}", "restore, s": "{restore_s}",
            "of the disk's rate": "{of_disk_percent}%",
        }, rows=_of_savers("ours-lazy", "ours-blocking", "torch.save-fsync", "dcp-async-stager",
                           "bare-writes")),
        "saved every step": saved_every_step,
        "saved targets": saved_targets,
    },
    "collectives.md": {
        "kernels": kernels,
        "quantised step": quantised_step,
        "zeropp parts measured": zeropp_parts,
    },
    "data.md": {
        "preprocess": Table("preprocess", {
            "contender": "{contender}", "seconds": "{seconds}", "relative to ours": "{of_ours:.2f}",
            "CPU seconds": "{cpu_seconds}",
            "tokens/s": lambda row: f"{row['tokens_per_second'] / 1e6:.2f}M",
            "peak MiB": "{peak_mib}",
        }),
    },
    "planner.md": {"layouts": layouts},
    "gpu.md": {"measured": gpu},
    "optimizer.md": {
        "optimizers": Table("optimizers", {
            "optimizer": "`{optimizer}`", "best rate": "{rate}", "last validation loss": "{loss}",
            "steps to AdamW's last loss": "{steps}",
            "bytes per parameter besides master weights": "{bytes}",
        }),
    },
    "checkpoint.md": {
        "kills": Table("kills", {"moment of the kill": "{moment}", "kills": "{kills}"}, after=(
            "After these kills: {resumes} resumes from a checkpoint, {lost_commits} lost commits, "
            "{losses_that_differ} losses that differ in a bit from those of an undisturbed run "
            "({steps_compared:,} steps compared), and at most {most_seconds_to_end} s from a kill "
            "to the end of all processes ({date}, {hardware}; `{command}`)."
        )),
    },
    "recovery.md": {
        "deaths": deaths,
        "slurm": Table("recovery", {
            "fault": "{fault}",
            "next step after": lambda row: _or_dash("{seconds_to_step:.1f} s", row),
            "steps done twice": "{steps_done_twice}", "the job": "{job}",
            "largest loss difference": lambda row: _or_dash("{largest_loss_difference:g}", row),
        }, rows=lambda content: content["slurm"]),
        "cost": cost,
    },
    "reliability.md": {
        "faults": Table("faults", {
            "what happened": "{fault}", "nodes free after": "{nodes_free_after}",
            "the job": "{job}", "first step after restart": "{first_new_step_after}",
            "steps done twice": "{steps_done_twice}",
            "log names the cause as":
                lambda row: f"`{row['culprit']}`" if row["culprit"] else "none expected",
            "largest difference of the loss": "{largest_loss_difference:.2g}",
        }),
        "elastic": Table("elastic", {
            "ranks": "{ranks}", "micro-batch": "{micro_batch}", "steps": "{steps}",
            "same samples as without stops":
                lambda row: "all" if row["samples_as_undisturbed"] else "no",
            "largest difference of the loss": "{largest_loss_difference:.2g}",
        }),
        "starts": starts,
    },
}  # fmt: skip
"""For each page: the tables by the names in its markers."""


def _or_dash(form: str, row: Row) -> str:
    return _cell(form, row) or "-"


def files() -> dict[Path, str]:
    """Return the content of each page with new tables."""
    pages = {}
    for page, blocks in PAGES.items():
        lines = {
            name: block.lines() if isinstance(block, Table) else block()
            for name, block in blocks.items()
        }
        pages[DOCS / page] = filled((DOCS / page).read_text(), lines)
    return pages
