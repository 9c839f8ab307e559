"""The tables of measurements, from benchmarks/results/*.json.

A page shows the most important rows; the JSON files have all rows. `PAGES` says for each block
which file it shows, and its columns.
"""

import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from docs.generate.blocks import RESULTS, Lines, Row, headed, load, select, table


@dataclass(frozen=True)
class Where:
    """A cell for those rows of a line that have some values: their cells, separated by commas."""

    form: str
    values: Mapping[str, object]


Cell = str | Callable[[Row], object] | Where
"""A format string for the keys of a row, a function of the row, or cells of several rows."""
AMD, INTEL = "AMD", "Intel"
PREDICTED = {"cost": "1", "copies": "1.04"}
"""Ratios that the docstring of benchmarks/bench_recovery.py derives."""
NODES_AND_LINKS = (("2 x 1", "1 Gbit/s"), ("2 x 2", "1 Gbit/s"), ("2 x 1", "200 Mbit/s"))
"""Nodes x ranks and links whose steps are shown."""
NOTHING = (
    "**Nothing on this page has been measured on a GPU.** The tests below show that the code is "
    "correct as far as this can",
    "be shown without one. They do not show how fast it is.",
)


@dataclass(frozen=True)
class Table:
    """A table of the rows of a file of benchmarks/results."""

    source: str
    columns: Mapping[str, Any]
    """A `Cell` by the heading of its column."""
    rows: Callable[[Mapping[str, Any]], Iterable[Row]] = lambda content: content["rows"]
    after: str | Callable[[Row], str] = ""
    """Format string for the keys of the file, or function of the file: a line below the table."""
    by: tuple[str, ...] = ()
    """Keys whose values are the same in all rows of a line; empty: each row has a line."""

    def __call__(self) -> Iterator[str]:
        """Yield the lines of the block."""
        content = load(self.source)
        lines: dict[object, list[Row]] = {}
        for number, row in enumerate(self.rows(content)):
            key = str([row[name] for name in self.by]) if self.by else number
            lines.setdefault(key, []).append(row)
        cells = ([_cell(form, *rows) for form in self.columns.values()] for rows in lines.values())
        yield from table(list(self.columns), cells)
        if self.after:
            yield ""
            after = self.after
            yield after.format_map(content) if isinstance(after, str) else after(content)


class _Cells(string.Formatter):
    """Formats cells; a cell with a value that was not measured is empty."""

    def format_field(self, value: Any, spec: str) -> str:
        if value is None:
            raise LookupError(spec)
        return str(super().format_field(value, spec))


def _cell(form: Cell, *rows: Row) -> str:
    """Return a cell of a line, of whose rows the first one counts if the form is for one row."""
    if isinstance(form, Where):
        return ", ".join(_cell(form.form, row) for row in select(rows, **form.values))
    if not isinstance(form, str):
        return str(form(rows[0]))
    try:
        return _Cells().vformat(form, (), rows[0])
    except LookupError:
        return ""


def _spread(key: str, spec: str = "", parts: Sequence[object] = (0, 1, 2)) -> str:
    """Return the format of a median with the smallest and the largest of the rounds.

    `parts` are the three indices or names below the key.
    """
    middle, least, most = (f"{{{key}[{part}]:{spec}}}" for part in parts)
    return f"{middle} ({least}, {most})"


def _span(key: str, spec: str) -> str:
    return _spread(key, spec, ("median", "min", "max"))


def _of_processors(content: Row) -> Iterator[Row]:
    """Yield the ratios of sharding.json with the name of the processor and a cell."""
    for row in content["ratios"]:
        bounds = f" ({row['least']:.2f}, {row['most']:.2f})" if row["least"] else ""
        (processor,) = (name for name in (AMD, INTEL) if name in row["hardware"])
        yield {**row, "processor": processor, "cell": f"{row['ratio']:.2f}{bounds}"}


def _compared(row: Row) -> str:
    """Return what a ratio of sharding.json compares."""
    better = "the better of " if len(row["over"]) > 1 else ""
    others = " and ".join(f"`{peer}`" for peer in row["over"])
    return f"{row['link']}: `{row['contender']}` to {better}{others}"


def _longest_case_first(content: Row) -> Iterator[Row]:
    """Yield the rows of pipeline.json, first those of the case with most contenders."""
    cases = sorted(content["cases"], key=lambda case: -len(case["rows"]))
    return _with_case({"cases": cases})


def _with_case(content: Row) -> Iterator[Row]:
    """Yield the rows of all cases, with the numbers of their case."""
    for case in content["cases"]:
        yield from ({**case, **row} for row in case["rows"])


@headed("peak of activations, MiB", "measured", "planned", "measured, `recompute=full`",
        "planned, `recompute=full`")  # fmt: skip
def pipeline_memory() -> Iterator[list[str]]:
    """Yield measured and planned memory with and without recomputation, in the same case."""
    (recomputed,) = load("pipeline_recompute")["cases"]
    numbers = {key: recomputed[key] for key in ("ranks", "micro_batches")}
    (plain,) = select(load("pipeline")["cases"], **numbers)
    for row in plain["rows"]:
        both = (row, *select(recomputed["rows"], contender=row["contender"]))
        sizes = (one[key] / 2**20 for one in both for key in ("peak_bytes", "planned_bytes"))
        yield [f"`{row['contender']}`", *(f"{size:.1f}" for size in sizes)]


def layouts() -> Iterator[str]:
    """Yield planned and measured layouts of CPU ranks."""
    found = load("planner_layouts")
    rows = found["rows"]
    yield from table(
        ("layout", "planned, ms", "measured, ms", "error", "planned, MiB", "measured, MiB",
         "error"),
        ((row["layout"], f"{row['planned_seconds'] * 1e3:.0f}", f"{row['seconds'] * 1e3:.0f}",
          f"{row['time_error']:+.1%}", f"{row['planned_bytes'] / 2**20:.1f}",
          f"{row['peak_bytes'] / 2**20:.1f}", f"{row['memory_error']:+.1%}") for row in rows),
    )  # fmt: skip
    time, memory = (fmean(abs(row[key]) for row in rows) for key in ("time_error", "memory_error"))
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


def _every_step_rows(content: Row) -> Iterator[Row]:
    """Yield the rows of savers inside training, with a save after every step."""
    for case in content["cases"]:
        yield {"ranks": case["ranks"], "name": "no saves", "end_to_end_ms": case["plain_ms"]}
        for row in _every_step(case)["rows"]:
            yield {"ranks": case["ranks"], "name": f"`{row['saver']}`", **row}


def _targets(content: Row) -> Iterator[Row]:
    """Yield the targets with a save after every step."""
    for case in content["cases"]:
        for target in _every_step(case)["targets"]:
            part, _, savers = target["name"].partition(", ")
            one, _, other = savers.partition(" over ")
            yield {"ranks": case["ranks"], **target, "name": f"{part}, `{one}` over `{other}`"}


def _machine_of_saves(content: Row) -> str:
    """Return the machine on which savers were compared inside training, and its load."""
    cases = content["cases"]
    rounds, ranks = (", ".join(str(case[key]) for case in cases) for key in ("rounds", "ranks"))
    others = [v for case in cases for values in case["other_cores"].values() for v in values]
    return (
        "Measured on {cores} cores of an {processor} ({date}, torch {torch}; `{command}`): "
    ).format_map(content) + (
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


def _deaths(content: Row) -> Iterator[Row]:
    """Yield the outcome of the kills of ranks and of nodes."""
    for series in content["deaths"]:
        seconds = sorted(series["seconds"])
        times = {"median": median(seconds), "95%": seconds[int(0.95 * len(seconds))]}
        yield {**series, **times, "worst": seconds[-1], "differences": len(series["problems"])}


@headed("figure", "measured", "predicted")
def cost() -> Iterator[tuple[str, str, str]]:
    """Yield the ratios of step times, and the effective training time."""
    results = load("recovery")
    names = {
        "cost": "step time with `recovery.enabled` over without",
        "copies": "step time with `recovery.partner_copies` over without, 113 MB per rank",
    }
    for part, name in names.items():
        ratios = sorted(results[part]["ratios"])
        spread = f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        yield name, spread, PREDICTED[part]
    found = results["goodput"]
    name = f"effective training time, {found['kills']} kills, {found['mtbf']:.0f} s apart"
    yield name, f"{found['measured']:.3f}", f"{found['predicted']:.3f}"


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


def _with_decimals(content: Row) -> Iterator[Row]:
    """Yield the rows of quantised_step.json with their ratio as text."""
    for row in content["rows"]:
        yield {**row, "text": f"{row['ratio']:.{row['decimals']}f}"}


def _of_savers(*names: str) -> Callable[[Row], Iterable[Row]]:
    return lambda content: [select(content["rows"], saver=name)[0] for name in names]


PAGES: Mapping[str, Mapping[str, Lines]] = {
    "docs/benchmarks.md": {
        "step": Table("step", {
            "date": "{date}", "machine": "{hardware}", "precision": "{precision}",
            "ours": "{ours_ms:.0f} ms", "plain torch": "{plain_torch_ms:.0f} ms",
            "ratio": "{ratio:.3f}", "ours compiled": "{ours_compiled_ms} ms",
            "plain torch compiled": "{plain_compiled_ms} ms",
            "ratio, compiled": "{compiled_ratio:.3f}",
        }),
        "sharding": Table("sharding", {
            "ratio of tokens/s": _compared, "target": "{target}",
            "AMD, fp32": Where("{cell}", {"processor": AMD, "precision": "fp32"}),
            "AMD, bf16": Where("{cell}", {"processor": AMD, "precision": "bf16"}),
            "Intel, fp32": Where("{cell}", {"processor": INTEL, "precision": "fp32"}),
            "Intel, bf16 (emulated)": Where("{cell}", {"processor": INTEL, "precision": "bf16"}),
        }, rows=_of_processors, by=("link", "contender", "over")),
        "library": Table("library", {
            "ranks": "{ranks}, {precision}", "contender": "`{contender}`",
            "step, ms": _spread("step_ms"), "speed over the faster FSDP2": _spread("speedup"),
            "sent, MB": "{sent_mb}", "counted, MB": "{counted_mb}",
        }, rows=_with_case),
        "library saves": Table("library", {
            "saver": "`{saver}`", "blocked, ms per step": _spread("blocked_ms"),
            "slowdown": _spread("slowdown"), "added, ms per step": "{added_ms}",
        }, rows=lambda content: content["saves"]["rows"]),
        "pipeline": Table("pipeline", {"time over `1f1b`": "`{contender}`"} | {
            f"{ranks} ranks, {count} micro-batches":
                Where("{over_1f1b:.3f}", {"ranks": ranks, "micro_batches": count})
            for ranks in (2, 4) for count in (2, 4, 8, 16)
        }, rows=_longest_case_first, by=("contender",), after=(
            "Measured on {cores} cores of an {processor} ({date}, torch {torch}), with samples of "
            "{sizes[sequence]} tokens, a width of {sizes[hidden]}, {rounds} rounds, and `--waiting "
            "{waiting}`."
        )),
        "pipeline memory": pipeline_memory,
        "checkpoint": Table("checkpoint", {
            "saver": "`{saver}`", "blocked, ms": "{blocked_ms}", "durable after, s": "{durable_s}",
            "compute meanwhile": "{compute_meanwhile}", "long step": "{long_step}",
            "short steps": "{short_steps}", "restore, s": "{restore_s}",
            "of the disk's rate": "{of_disk_percent}%",
        }, rows=_of_savers("ours-lazy", "ours-blocking", "torch.save-fsync", "dcp-async-stager",
                           "bare-writes")),
        "saved every step": Table("saved_training", {
            "ranks": "{ranks}", "saver": "{name}",
            "blocked, ms per save": _span("blocked_ms", ".1f"),
            "end to end, ms per step": _span("end_to_end_ms", ".0f"),
            "slowdown": _span("slowdown", ".2f"),
            "lower bound, ms per step": "{bound_ms:.0f}",
        }, rows=_every_step_rows),
        "saved targets": Table("saved_training", {
            "ranks": "{ranks}", "ratio": "{name}", "target": "{target:.3g}",
            # four digits, so that a target that is just missed differs from the ratio
            "measured": _span("ratio", ".4g"), "ratio of the lower bounds": "{ratio_of_bounds:.2f}",
            "": lambda row: "met" if row["is_met"] else "missed",
        }, rows=_targets, after=_machine_of_saves),
    },
    "docs/collectives.md": {
        "kernels": Table("quantisation_kernels", {
            "kernels": "{kernels}", "format": lambda row: row["format"] or "-",
        } | {
            f"{wide}: {key}".replace("_", " "): Where(f"{{{key}}}", {"wide": wide})
            for wide in ("fp32", "bf16") for key in ("quantise", "dequantise", "add_to_fp32")
        }, by=("kernels", "format")),
        "quantised step": Table("quantised_step", {
            "ratio of tokens/s": "{what}", "target": "{target}",
        } | {
            f"{grid}{', 200 Mbit/s' * (link != '1 Gbit/s')}, {cpu}: {precisions}":
                Where("{text}", {"nodes_x_ranks": grid, "link": link, "processor": cpu})
            for grid, link in NODES_AND_LINKS
            for cpu, precisions in ((AMD, "fp32, bf16"), (INTEL, "fp32"))
        }, rows=_with_decimals, by=("what",)),
        "zeropp parts measured": Table("zeropp_parts", {
            "parts": "{parts}",
            "overrides": "`sharding={sharding} collectives={collectives}`",
            "sent between nodes per rank, MB": "{sent_mb:.1f}",
        } | {
            heading: Where(form, {"link": link})
            for link in ("200 Mbit/s", "1 Gbit/s")
            for heading, form in (
                (f"tokens/s, {link}", "{tokens_per_second:.0f}"),
                (f"speed-up, {link}", "{ratio:.2f}x"),
            )
        }, by=("parts",)),
    },
    "docs/data.md": {
        "preprocess": Table("preprocess", {
            "contender": "{contender}", "seconds": "{seconds}", "relative to ours": "{of_ours:.2f}",
            "CPU seconds": "{cpu_seconds}",
            "tokens/s": lambda row: f"{row['tokens_per_second'] / 1e6:.2f}M",
            "peak MiB": "{peak_mib}",
        }),
    },
    "docs/planner.md": {"layouts": layouts},
    "docs/gpu.md": {"measured": gpu},
    "docs/optimizer.md": {
        "optimizers": Table("optimizers", {
            "optimizer": "`{optimizer}`", "best rate": "{rate}", "last validation loss": "{loss}",
            "steps to AdamW's last loss": "{steps}",
            "bytes per parameter besides master weights": "{bytes}",
        }),
    },
    "docs/checkpoint.md": {
        "kills": Table("kills", {"moment of the kill": "{moment}", "kills": "{kills}"}, after=(
            "After these kills: {resumes} resumes from a checkpoint, {lost_commits} lost commits, "
            "{losses_that_differ} losses that differ in a bit from those of an undisturbed run "
            "({steps_compared:,} steps compared), and at most {most_seconds_to_end} s from a kill "
            "to the end of all processes ({date}, {hardware}; `{command}`)."
        )),
    },
    "docs/recovery.md": {
        "deaths": Table("recovery", {
            "killed": "{name}", "processes": "{processes_killed}", "steps": "{steps_compared}",
            "differences": "{differences}", "to the next step, median": "{median:.2f} s",
            "95%": "{95%:.2f} s", "worst": "{worst:.2f} s",
        }, rows=_deaths),
        "slurm": Table("replaced", {
            "fault": "{fault}",
            "next step after": lambda row: _or_dash("{seconds_to_step:.1f} s", row),
            "steps done twice": "{steps_done_twice}", "the job": "{job}",
            "largest loss difference": lambda row: _or_dash("{largest_loss_difference:g}", row),
        }),
        "cost": cost,
    },
    "docs/reliability.md": {
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
