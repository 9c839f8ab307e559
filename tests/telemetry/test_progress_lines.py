import io
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from frontier_llm.telemetry.log import close_logging, setup_logging
from frontier_llm.telemetry.progress_lines import LiveLine, ProgressLines, _format_fields
from frontier_llm.units import format_seconds
from tests.telemetry.runs import step_metrics


@pytest.fixture(autouse=True)
def _restored_logging():
    logger = logging.getLogger("frontier_llm")
    before = logger.propagate, logger.level
    yield
    close_logging()
    logger.propagate, logger.level = before


def _run(console, *, live, **changes):
    sink = ProgressLines(30, 10, console, live=live)
    for step in range(1, 31):
        sink.write(step_metrics(step, **changes.get(f"step{step}", {})))
    sink.close()


def test_without_a_terminal_there_are_plain_lines_every_few_steps(tmp_path):
    file = io.StringIO()
    console = Console(file=file, width=40)
    setup_logging(0, tmp_path, console)
    _run(console, live=False, step7={"skipped": True}, step15={"validation_loss": 3.25})
    lines = file.getvalue().splitlines()
    assert [line.split("step ")[1].split("/")[0] for line in lines] == [
        "1",
        "7",
        "10",
        "15",
        "20",
        "30",
    ]
    assert "skipped" in lines[1]
    assert "validation 3.2500" in lines[3]
    assert "loss" in lines[2]
    assert "tokens/s" in lines[2]
    assert "ETA" in lines[2]
    assert "MFU" not in lines[2]
    assert "step 10/30" in (tmp_path / "run.log").read_text()


def test_a_terminal_has_a_live_line_too():
    file = io.StringIO()
    console = Console(file=file, width=160, force_terminal=True)
    setup_logging(0, None, console)
    sink = ProgressLines(30, 10, console, live=True)
    sink.write(step_metrics(2, mfu=0.415))
    sink.close()
    assert "2/30" in file.getvalue()
    assert "MFU 41.5%" in file.getvalue()


@given(
    width=st.integers(40, 200),
    total=st.integers(1, 10**7),
    seconds=st.floats(1e-3, 3e7),
    steps=st.lists(st.sampled_from([{}, {"validation_loss": 3.25}, {"mfu": 0.4}, {"z_loss": 1e-3},
        {"loss": 123456.7}, {"grad_norm": 1e9}, {"validation_bits_per_byte": 1.5},
        ]), max_size=4),
)  # fmt: skip
def test_the_live_line_fits_and_keeps_step_bar_and_eta(width, total, seconds, steps):
    line = LiveLine(total)
    for step, changes in enumerate(steps, 1):
        fields = _format_fields(step_metrics(step, **changes))
        line.show(min(step, total), seconds, fields)
    rendered = Console(width=width, file=io.StringIO()).render_lines(line, pad=False)
    assert len(rendered) == 1
    text = "".join(segment.text for segment in rendered[0])
    assert cell_len(text) <= width
    assert text.startswith(f"{min(len(steps), total):>{len(str(total))}}/{total}")
    if width >= 60:
        eta = format_seconds(seconds) if steps else "unknown"
        assert f"  ETA {eta}" in text
        assert text.count("━") + text.count("─") >= 4
    if width >= 80 and steps:
        assert "loss " in text


def test_a_narrow_line_drops_norm_rate_and_flops_first():
    line = LiveLine(2000)
    line.show(7, 5000.0, _format_fields(step_metrics(7, validation_loss=3.25, mfu=0.4)))
    line.show(8, 5000.0, _format_fields(step_metrics(8, mfu=0.4)))
    names = ("loss", "validation 3.2500", "tokens/s", "MFU", "norm", "lr", "TFLOP/s")
    shown = []
    for width in range(60, 201):
        console = Console(width=width, file=io.StringIO())
        text = "".join(segment.text for segment in console.render_lines(line, pad=False)[0])
        shown.append(sum(name in text for name in names))
        assert all(name in text for name in names[: shown[-1]]), "the first names are kept"
    assert shown == sorted(shown)
    assert (shown[0], shown[-1]) == (1, len(names))


def test_the_remaining_time_follows_the_step_time(caplog):
    sink = ProgressLines(100, 10, Console(file=io.StringIO()), live=False)
    with caplog.at_level(logging.INFO, logger="frontier_llm"):
        for step in range(1, 41):
            sink.write(step_metrics(step, step_seconds=2.0))
    assert "ETA 2 min 00 s" in caplog.messages[-1]


def test_other_ranks_say_only_warnings_and_who_they_are(tmp_path, capsys):
    setup_logging(3, tmp_path)
    logging.getLogger("frontier_llm.some.module").info("a step is done")
    logging.getLogger("frontier_llm.some.module").warning("a link is slow")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "[rank 3] WARNING: a link is slow\n"
    assert not (tmp_path / "run.log").exists()


def test_details_are_only_in_the_file_in_order(tmp_path):
    file = io.StringIO()
    logger = setup_logging(0, None, Console(file=file))
    logger.debug("an early detail")
    logger.info("an early line")
    setup_logging(0, tmp_path, Console(file=file))
    logger.debug("a late detail")
    written = (tmp_path / "run.log").read_text()
    assert [line.partition(": ")[2] for line in written.splitlines()] == [
        "an early detail",
        "an early line",
        "a late detail",
    ]
    assert file.getvalue().count("an early line") == 1
    assert "detail" not in file.getvalue()


def test_setting_up_twice_does_not_say_everything_twice():
    file = io.StringIO()
    for _ in range(2):
        setup_logging(0, None, Console(file=file))
    logging.getLogger("frontier_llm.x").info("[bold] is no markup")
    assert file.getvalue().count("[bold] is no markup") == 1


def test_a_full_disk_takes_the_log_file_and_nothing_else(tmp_path):
    (tmp_path / "run.log").symlink_to("/dev/full")
    file = io.StringIO()
    logger = setup_logging(0, tmp_path, Console(file=file))
    for number in range(3):
        logger.info("line %d", number)
    said = file.getvalue()
    assert said.count("run.log cannot be written") == 1
    assert "line 2" in said


def test_a_closed_pipe_does_not_end_the_run(tmp_path):
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    logger = setup_logging(0, tmp_path, Console(file=Broken()))
    logger.info("to whom it may concern")
    logger.info("and again")
    assert "and again" in (tmp_path / "run.log").read_text()
