"""Make report.html, a self-contained page about a run.

The page is made from config.yaml, metrics.jsonl, summary.json and timeline.json of the run
directory, at the end of the run and by `frontier-llm report RUN_DIR`. It can also be made for a run
that was killed.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from frontier_llm.atomic_files import replace_text
from frontier_llm.errors import TrainingError, file_failure
from frontier_llm.geometry.wire import Sent, level_labels
from frontier_llm.telemetry import figures, html_page
from frontier_llm.telemetry.history import History
from frontier_llm.telemetry.html_page import UNKNOWN, Tile
from frontier_llm.telemetry.jsonl import METRICS_FILE
from frontier_llm.telemetry.metrics import BITS_PER_BYTE
from frontier_llm.telemetry.report_sections import (
    layout_section,
    memory_section,
    pipeline_section,
    plan_section,
)
from frontier_llm.telemetry.step_timeline import TIMELINE_FILE, StepTimeline
from frontier_llm.telemetry.summary import SUMMARY_FILE, RunSummary
from frontier_llm.units import counted, format_bytes, format_count, format_seconds

REPORT_FILE = "report.html"
CONFIG_FILE = "config.yaml"


def write_report(run_dir: Path) -> Path:
    """Write report.html of a run directory; any of the run's files may be absent.

    Raises a TrainingError if the file cannot be written; the message names it.
    """
    path = run_dir / REPORT_FILE
    try:
        replace_text(path, make_report(run_dir))
    except OSError as error:
        raise TrainingError(file_failure(path, "written", error)) from error
    return path


def make_report(run_dir: Path) -> str:
    """Return the report of a run directory as HTML."""
    history = History.read(run_dir)
    summary = RunSummary.read(run_dir) or RunSummary()
    return html_page.page(
        title=summary.model or run_dir.resolve().name,
        badge=_badge(summary, history),
        subtitle=_subtitle(summary, run_dir),
        body=[
            html_page.tiles(_tiles(history, summary)),
            *_damaged(run_dir, history),
            *_charts(history, summary),
            *layout_section(summary),
            *memory_section(summary),
            *plan_section(summary),
            *pipeline_section(summary, StepTimeline.read(run_dir)),
            *_wire(history),
            *_samples(summary),
            *_config(run_dir),
            *_versions(summary),
        ],
    )


def _damaged(run_dir: Path, history: History) -> Iterator[str]:
    """Yield the section on files that cannot be read, or only in part."""
    damaged = [
        f"{name} is damaged and left out"
        for name, found in (
            (SUMMARY_FILE, RunSummary.read(run_dir)),
            (TIMELINE_FILE, StepTimeline.read(run_dir)),
        )
        if found is None and (run_dir / name).exists()
    ]
    if lines := history.damaged:
        damaged.append(
            f"{counted(len(lines), 'line')} of {METRICS_FILE} are damaged and left out, the first "
            f"is line {lines[0]}"
        )
    if damaged:
        yield html_page.section("Damaged files", "", f"{'; '.join(damaged)}.")


def _badge(summary: RunSummary, history: History) -> tuple[str, str]:
    """Return the colour and the text of the badge, which tells how the run ended."""
    if summary.exit_code is None and summary.exit_reason is None:
        return "bad", f"no end recorded, {counted(len(history), 'step')}"
    # exit code 3: the run was asked to stop, and saved its state
    colours = {None: "mild", 0: "good", 3: "mild"}
    text = summary.exit_reason or ("finished" if summary.exit_code == 0 else "stopped")
    return colours.get(summary.exit_code, "bad"), text


def _subtitle(summary: RunSummary, run_dir: Path) -> str:
    layout = summary.layout
    facts = [run_dir.resolve().name if summary.model else ""]
    if layout is not None:
        facts.append(counted(layout.ranks, "rank"))
    facts += [summary.precision or "", summary.device or ""]
    return " · ".join(fact for fact in facts if fact)


def _tiles(history: History, summary: RunSummary) -> Iterator[Tile]:
    since = summary.validation_since
    yield _training_tile(history, summary)
    bits = _last(history, "validation_bits_per_byte", summary.validation_bits_per_byte, since)
    note = f"{bits:.3f} bits per byte of text" if bits is not None else ""
    loss = _last(history, "validation_loss", summary.validation_loss, since)
    point = history.last_point("validation_loss", since)
    if point and point[0] < history.steps[-1]:
        note = f"of step {point[0]}{'; ' * bool(note)}{note}"
    yield Tile("Validation loss", _known(loss, "{:.3f}"), "nats per token", note)
    speed = _known(history.typical("tokens_per_second"))
    yield Tile("Throughput", speed, "tokens/s", "all ranks together, median")
    tflops = _known(history.typical("model_tflops_per_device"), "{:.3g}")
    mfu, hfu = history.typical("mfu"), history.typical("hfu")
    note = "model FLOPs, median" if mfu is not None else "model FLOPs; peak unknown"
    yield Tile("Speed per device", tflops, "TFLOP/s", note)
    if mfu is not None:
        executed = f", HFU {hfu:.1%} with recomputation" if hfu is not None else ""
        yield Tile("MFU", f"{mfu:.1%}", "of the peak", f"median{executed}")
    yield Tile("Parameters", _known(summary.parameters), note=summary.precision or "")
    steps = f"{len(history)} of " * bool(summary.total_steps)
    steps += counted(summary.total_steps or len(history), "step")
    skipped = f", {len(history.skipped)} skipped" if history.skipped else ""
    tokens = _known(_last(history, "tokens", summary.tokens))
    yield Tile("Trained on", tokens, "tokens", f"{steps}{skipped}")
    yield _duration_tile(history, summary)


def _training_tile(history: History, summary: RunSummary) -> Tile:
    points, note = history.points("loss"), "last step"
    loss = _last(history, "loss", summary.final_loss)
    if points and points[-1][0] != history.steps[-1]:
        step, loss = points[-1]
        note = f"step {step}; not finite since"
    return Tile("Training loss", _known(loss, "{:.3f}"), "nats per token", note)


def _duration_tile(history: History, summary: RunSummary) -> Tile:
    seconds = summary.seconds
    if seconds is None:
        seconds = history.total("step_seconds") or None
    step = history.typical("step_seconds")
    note = f"{format_seconds(step)} per step, median" if step is not None else ""
    stall = history.total("checkpoint_stall_seconds")
    if stall >= 1e-3:
        note += f"; {format_seconds(stall)} waiting for checkpoints"
    if skipped := history.total("checkpoints_skipped"):
        note += f"; {skipped:.0f} checkpoints skipped"
    if failures := history.total("archive_failures"):
        note += f"; the archive command failed {failures:.0f} times"
    duration = UNKNOWN if seconds is None else format_seconds(seconds)
    return Tile("Duration of all steps", duration, note=note)


def _charts(history: History, summary: RunSummary) -> Iterator[str]:
    if not len(history):
        text = "No step was completed, so there is nothing to draw."
        yield html_page.section("No metrics", "", text)
        return
    loss_chart = figures.loss_figure(
        history, summary.initial_validation_loss, summary.validation_since
    )
    yield html_page.section("Loss", loss_chart, _describe_loss(history, summary))
    yield html_page.section("Speed", figures.speed_figure(history))
    yield html_page.section("Gradient norm and learning rate", figures.optimizer_figure(history))


def _describe_loss(history: History, summary: RunSummary) -> str:
    """Return a paragraph on the validation loss and on steps whose loss is not finite."""
    since, first = summary.validation_since, summary.initial_validation_loss
    bits = _last(history, "validation_bits_per_byte", summary.validation_bits_per_byte, since)
    last = _last(history, "validation_loss", summary.validation_loss, since)
    sentences = []
    if first is not None and last is not None:
        sentences.append(f"Validation loss went from {first:.3f} to {last:.3f} nats per token")
    elif last is not None:
        sentences.append(f"Validation loss ended at {last:.3f} nats per token")
    if sentences and bits is not None:
        sentences[0] += f", which is {bits:.3f} {BITS_PER_BYTE}"
    if sentences and summary.validation_samples is not None:
        sentences.append(f"A validation reads {counted(summary.validation_samples, 'sample')}")
    not_finite = len(history) - len(history.points("loss"))
    if not_finite:
        sentences.append(f"{counted(not_finite, 'step')} had a loss that is not finite")
    if history.skipped:
        sentences.append(f"{counted(len(history.skipped), 'update')} skipped")
    return "".join(f"{sentence}. " for sentence in sentences).strip()


def _wire(history: History) -> Iterator[str]:
    sent = history.sent_bytes_per_step()
    if not len(history):
        return
    if not sent:
        yield html_page.section("Communication", "", "Nothing was sent: the run has one rank.")
        return
    text = "Bytes that all ranks together send per step, averaged over the run."
    unquantised = history.sent_bytes_per_step("unquantised_bytes")
    if unquantised:
        text += (
            " The column 'Unquantised' shows the bytes that the same collectives would send in the "
            "compute format."
        )
    table = _wire_table(sent, unquantised)
    yield html_page.section("Communication", figures.wire_figure(sent) + table, text)


def _wire_table(sent: Mapping[str, Sent], unquantised: Mapping[str, Sent]) -> str:
    """Return a table with one row per collective, and a row of their sum.

    `unquantised` has the bytes that quantised collectives would send in the compute format. With
    any, the last columns are these bytes, and the factor saved between nodes (`4.0x`).
    """
    volumes = dict(sorted(sent.items(), key=lambda item: -item[1].total))
    plain = {name: unquantised.get(name, volume) for name, volume in sent.items()}
    volumes["sum"] = total = sum(sent.values(), Sent())
    plain["sum"] = sum(plain.values(), Sent())
    levels, rows = level_labels(sent.values()), []
    for name, volume in volumes.items():
        row = [figures.collective_name(name), *(format_bytes(volume.at(level)) for level in levels)]
        row += [format_bytes(volume.total), f"{volume.total / total.total:.1%}"]
        if unquantised:
            saved = f"{plain[name].network / volume.network:.1f}x" if volume.network else ""
            row += [format_bytes(plain[name].total), saved]
        rows.append(row)
    head = ["Collective", *(label.capitalize() for label in levels.values()), "Together", "Share"]
    more = ["Unquantised", "Saved between nodes"] if unquantised else []
    return html_page.table([*head, *more], rows, last_is_sum=True)


def _samples(summary: RunSummary) -> Iterator[str]:
    if summary.samples:
        pairs = [(sample.prompt, sample.text) for sample in summary.samples]
        text = "Sampled from the model at the end of the run. The prompts are marked."
        yield html_page.section("Text samples", html_page.element("samples", pairs), text)


def _config(run_dir: Path) -> Iterator[str]:
    try:
        content = (run_dir / CONFIG_FILE).read_bytes() if (run_dir / CONFIG_FILE).is_file() else b""
    except OSError:
        return
    if not content:
        return
    digest = f"sha256 {hashlib.sha256(content).hexdigest()}"
    text = content.decode("utf-8", errors="replace")
    yield html_page.element("folded", "Configuration", digest, text)


def _versions(summary: RunSummary) -> Iterator[str]:
    facts = [f"{name} {version}" for name, version in summary.versions.items()]
    if summary.kernels:
        facts.append(f"kernels: {summary.kernels}")
    if facts:
        yield html_page.element("footer", " · ".join(facts))


def _last(history: History, column: str, of_summary: float | None, since: int = 0) -> float | None:
    """Return the value of the summary, or the last one of later steps; None if none is known."""
    point = history.last_point(column, since)
    return of_summary if of_summary is not None else point and point[1]


def _known(value: float | None, form: str = "") -> str:
    """Return a number in a format, by default with a unit such as M; or `UNKNOWN`."""
    if value is None:
        return UNKNOWN
    return form.format(value) if form else format_count(value)
