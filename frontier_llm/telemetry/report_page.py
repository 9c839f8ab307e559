"""report.html: a run on one self-contained page, made from the three files of its directory.

`frontier-llm report RUN_DIR` makes it again at any time, also for a run that was killed.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from frontier_llm.errors import TrainingError
from frontier_llm.geometry.wire import Sent
from frontier_llm.telemetry import figures, html_page
from frontier_llm.telemetry.history import History
from frontier_llm.telemetry.html_page import UNKNOWN, Tile, counted
from frontier_llm.telemetry.report_sections import layout_section, memory_section, plan_section
from frontier_llm.telemetry.summary import RunSummary
from frontier_llm.units import format_bytes, format_count, format_seconds

REPORT_FILE = "report.html"
CONFIG_FILE = "config.yaml"


def write_report(run_dir: Path) -> Path:
    """Write report.html of a run directory; any of the run's files may be absent.

    Returns:
        Path of the report.

    Raises:
        TrainingError: the file cannot be written; the message names it.
    """
    path = run_dir / REPORT_FILE
    try:
        path.write_text(make_report(run_dir), encoding="utf-8")
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error.strerror}") from error
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
            *_charts(history, summary),
            *layout_section(summary),
            *memory_section(summary),
            *plan_section(summary),
            *_wire(history),
            *_samples(summary),
            *_config(run_dir),
            *_versions(summary),
        ],
    )


def _badge(summary: RunSummary, history: History) -> tuple[str, str]:
    """Return the colour and the words for how the run ended."""
    if summary.exit_code is None and summary.exit_reason is None:
        return "bad", f"no end recorded, {counted(len(history), 'step')}"
    kinds = {None: "mild", 0: "good", 3: "mild"}
    words = summary.exit_reason or ("finished" if summary.exit_code == 0 else "stopped")
    return kinds.get(summary.exit_code, "bad"), words


def _subtitle(summary: RunSummary, run_dir: Path) -> str:
    layout = summary.layout
    words = [run_dir.resolve().name if summary.model else ""]
    if layout is not None:
        words.append(counted(layout.ranks, "rank"))
    words += [summary.precision or "", summary.device or ""]
    return " · ".join(word for word in words if word)


def _tiles(history: History, summary: RunSummary) -> Iterator[Tile]:
    yield _training_tile(history, summary)
    yield _validation_tile(history, summary)
    speed = history.typical("tokens_per_second")
    yield Tile("Throughput", _count(speed), "tokens/s", "all ranks together, median")
    tflops = history.typical("model_tflops_per_device")
    yield Tile("Speed per device", _digits(tflops), "TFLOP/s", "model FLOPs, median")
    mfu, hfu = history.typical("mfu"), history.typical("hfu")
    if mfu is None:
        yield Tile("MFU", UNKNOWN, note="peak unknown for this device")
    else:
        executed = f", HFU {hfu:.1%} with recomputation" if hfu is not None else ""
        yield Tile("MFU", f"{mfu:.1%}", "of the peak", f"median{executed}")
    yield Tile("Parameters", _count(summary.parameters), note=summary.precision or "")
    tokens = _first(summary.tokens, history.last("tokens"))
    yield Tile("Trained on", _count(tokens), "tokens", _step_words(history, summary))
    yield _duration_tile(history, summary)


def _training_tile(history: History, summary: RunSummary) -> Tile:
    points = history.points("loss")
    if points and points[-1][0] != history.steps[-1]:
        note = f"step {points[-1][0]}; not finite since"
        return Tile("Training loss", _fixed(points[-1][1]), "nats per token", note)
    loss = _first(summary.final_loss, history.last("loss"))
    return Tile("Training loss", _fixed(loss), "nats per token", "last step")


def _validation_tile(history: History, summary: RunSummary) -> Tile:
    loss = _first(summary.validation_loss, history.last("validation_loss"))
    bits = _first(summary.validation_bits_per_byte, history.last("validation_bits_per_byte"))
    note = f"{bits:.3f} bits per byte of text" if bits is not None else ""
    return Tile("Validation loss", _fixed(loss), "nats per token", note)


def _duration_tile(history: History, summary: RunSummary) -> Tile:
    seconds = _first(summary.seconds, history.total("step_seconds") or None)
    step = history.typical("step_seconds")
    note = f"{format_seconds(step)} per step, median" if step is not None else ""
    stall = history.total("checkpoint_stall_seconds")
    if stall:
        note += f"; {format_seconds(stall)} waiting for checkpoints"
    return Tile("Duration", UNKNOWN if seconds is None else format_seconds(seconds), note=note)


def _step_words(history: History, summary: RunSummary) -> str:
    wanted = f" of {summary.total_steps}" if summary.total_steps else ""
    skipped = f", {len(history.skipped)} skipped" if history.skipped else ""
    return f"{len(history)}{wanted} steps{skipped}"


def _charts(history: History, summary: RunSummary) -> Iterator[str]:
    if not len(history):
        words = "No step was completed, so there is nothing to draw."
        yield html_page.section("No metrics", "", words)
        return
    words = _loss_words(history, summary)
    initial = summary.initial_validation_loss
    yield html_page.section("Loss", figures.loss_figure(history, initial), words)
    yield html_page.section("Speed", figures.speed_figure(history))
    yield html_page.section("Gradient norm and learning rate", figures.optimizer_figure(history))


def _loss_words(history: History, summary: RunSummary) -> str:
    last = _first(summary.validation_loss, history.last("validation_loss"))
    first = summary.initial_validation_loss
    bits = _first(summary.validation_bits_per_byte, history.last("validation_bits_per_byte"))
    sentences = []
    if first is not None and last is not None:
        sentences.append(f"Validation loss went from {first:.3f} to {last:.3f} nats per token")
    elif last is not None:
        sentences.append(f"Validation loss ended at {last:.3f} nats per token")
    if sentences and bits is not None:
        sentences[0] += f", which is {bits:.3f} bits per byte of the validation text"
    bad = len(history) - len(history.points("loss"))
    if bad:
        sentences.append(f"{counted(bad, 'step')} had a loss that is not finite")
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
    words = "Bytes that all ranks together send per step, averaged over the run."
    plain = history.sent_bytes_per_step("unquantised_bytes")
    if plain:
        words += " Unquantised: bytes of the same collectives in the compute format."
    table = _wire_table(sent, plain)
    yield html_page.section("Communication", figures.wire_figure(sent) + table, words)


def _wire_table(sent: Mapping[str, Sent], plain: Mapping[str, Sent]) -> str:
    total = sum(sent.values(), Sent())
    everything = total.intra + total.inter
    ordered = sorted(sent.items(), key=lambda item: -(item[1].intra + item[1].inter))
    unquantised = {name: plain.get(name, volume) for name, volume in sent.items()}
    unquantised["all"] = sum(unquantised.values(), Sent())
    rows = []
    for name, volume in [*ordered, ("all", total)]:
        together = volume.intra + volume.inter
        row = [name.replace("_", " "), format_bytes(volume.intra), format_bytes(volume.inter)]
        row += [format_bytes(together), f"{together / everything:.1%}"]
        rows.append(row + _unquantised_cells(unquantised[name], volume) * bool(plain))
    head = ["Collective", "Inside a node", "Between nodes", "Together", "Share"]
    more = ["Unquantised", "Saved between nodes"] if plain else []
    return html_page.table([*head, *more], rows, last_is_sum=True)


def _unquantised_cells(plain: Sent, sent: Sent) -> list[str]:
    saved = f"{plain.inter / sent.inter:.1f}x" if sent.inter else ""
    return [format_bytes(plain.intra + plain.inter), saved]


def _samples(summary: RunSummary) -> Iterator[str]:
    if summary.samples:
        body = "".join(html_page.sample(sample.prompt, sample.text) for sample in summary.samples)
        words = "Sampled from the model at the end of the run; prompts are marked."
        yield html_page.section("Text samples", body, words)


def _config(run_dir: Path) -> Iterator[str]:
    try:
        content = (run_dir / CONFIG_FILE).read_bytes()
    except OSError:
        return
    digest = f"sha256 {hashlib.sha256(content).hexdigest()}"
    yield html_page.folded("Configuration", digest, content.decode("utf-8", errors="replace"))


def _versions(summary: RunSummary) -> Iterator[str]:
    words = [f"{name} {version}" for name, version in summary.versions.items()]
    if summary.kernels:
        words.append(f"kernels: {summary.kernels}")
    if words:
        yield html_page.footer(" · ".join(words))


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _fixed(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"


def _digits(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g}"


def _count(value: float | None) -> str:
    return UNKNOWN if value is None else format_count(value)
