import hashlib
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from frontier_lab.commands import report as report_command
from frontier_llm.cli.options import run_command
from frontier_llm.geometry.wire import Sent
from frontier_llm.telemetry.figures import memory_figure, wire_figure
from frontier_llm.telemetry.history import History
from frontier_llm.telemetry.html_page import section
from frontier_llm.telemetry.report_page import make_report, write_report
from frontier_llm.telemetry.report_sections import layer_words
from frontier_llm.telemetry.summary import Layout, PlanRow, RunSummary, TextSample
from tests.telemetry.runs import make_run, step_metrics

FOUR = Layout(pipeline=2, data=2, ranks_per_node=4)
SIXTY_FOUR = Layout(tensor=2, pipeline=4, data=8, ranks_per_node=8)
VOID = {"meta", "br", "link", "input"}


class Page(HTMLParser):
    """Collects what a reader sees, and insists on balanced elements and unique ids."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []
        ids = [attrs["id"] for _, attrs in self.elements if "id" in attrs]
        assert len(ids) == len(set(ids))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(word for word in self.words if word)

    def figures(self) -> set[str | None]:
        return {attrs.get("aria-label") for tag, attrs in self.elements if tag == "svg"}


def _page(run_dir: Path) -> Page:
    return Page(make_report(run_dir))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory) -> Path:
    """A finished run of four ranks with its report."""
    run_dir = tmp_path_factory.mktemp("four")
    make_run(run_dir, FOUR)
    write_report(run_dir)
    return run_dir


@pytest.fixture(scope="module")
def page_of_four(four_ranks) -> Page:
    return Page((four_ranks / "report.html").read_text())


@pytest.mark.parametrize(("layout", "layers"), [(FOUR, 4), (SIXTY_FOUR, 32)])
def test_a_report_shows_every_figure_and_every_rank(layout, layers, tmp_path):
    make_run(tmp_path, layout, layers=layers, steps=20)
    page = _page(tmp_path)
    assert page.figures() == {"loss", "speed", "optimizer", "grid of ranks", "memory", "wire"}
    for rank in range(layout.ranks):
        assert f"rank {rank}" in page.words
    assert f"{layout.ranks} ranks" in page.text
    assert "peak unknown" in page.text
    assert "4.47M" in page.words


def test_key_figures_are_those_of_the_run(four_ranks, page_of_four):
    page, history = page_of_four, History.read(four_ranks)
    validation = history.last("validation_loss")
    assert validation is not None
    assert f"{step_metrics(200).loss:.3f}" in page.words
    assert f"{validation:.3f}" in page.words
    assert f"{validation * 0.42:.3f} bits per byte of text" in page.words
    assert "from 8.410 to" in page.text
    assert "layers 0-1" in page.words


def test_an_older_validation_says_of_which_step_it_is(tmp_path):
    losses = [None, 3.5, None]
    lines = [step_metrics(n, validation_loss=loss).to_json() for n, loss in enumerate(losses, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert "3.500 nats per token of step 2" in " ".join(_page(tmp_path).text.split())
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n")
    assert "of step 2" not in _page(tmp_path).text


def test_a_known_peak_gives_mfu_and_hfu(tmp_path):
    lines = [step_metrics(s, mfu=0.412, hfu=0.507).to_json() for s in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    text = _page(tmp_path).text
    assert "41.2%" in text
    assert "HFU 50.7%" in text


def test_bytes_add_up_by_collective_and_link(page_of_four):
    text = page_of_four.text
    assert "tied copies 0 B 8.01 MiB 8.01 MiB 7.0%" in text
    assert "sum 80.59 MiB 34.24 MiB 114.82 MiB 100.0%" in text
    assert "loss and gradient norm 400 B 200 B" in text
    assert "totals" not in text
    assert "sequence norms" not in text


def test_a_report_needs_no_other_file_and_no_network(four_ranks, page_of_four):
    html = (four_ranks / "report.html").read_text()
    without_namespaces = re.sub(r'xmlns(:xlink)?="[^"]*"', "", html)
    assert "http" not in without_namespaces
    tags = {tag for tag, _ in page_of_four.elements}
    assert not tags & {"script", "link", "img", "iframe", "object"}
    assert re.findall(r"url\((?!#)", html) == []


def test_names_in_backticks_are_code_and_everything_else_is_text(tmp_path):
    rows = [PlanRow(name="process", unit="bytes", predicted=None, measured=5)]
    make_run(tmp_path, FOUR, steps=2).model_copy(update={"plan": rows}).write(tmp_path)
    html = make_report(tmp_path)
    assert "<code>process</code> is the memory" in html
    assert "<code>frontier-llm calibrate</code>" in html
    assert "`" not in re.sub(r"<(style|pre).*?</\1>", "", html, flags=re.S)
    assert section("t", "", "`<a>` & b") == (
        "<section><h2>t</h2><p><code>&lt;a&gt;</code> &amp; b</p></section>"
    )


def test_a_legend_names_only_what_is_drawn():
    drawn = memory_figure(["0"], {"master": [5.0], "gathered": [0.0]}, [9.0], "rank")
    assert "master" in drawn
    assert "gathered" not in drawn
    bytes_sent = {"tensor": Sent(node=5.0, network=0.0)}
    assert "between nodes" not in wire_figure(bytes_sent)


def test_text_of_the_run_is_escaped(tmp_path):
    summary = make_run(tmp_path, FOUR, steps=2)
    attack = "</pre><script>alert(1)</script>"
    hostile = summary.model_copy(
        update={
            "model": attack,
            "samples": [TextSample(prompt=attack, text="<b>&amp;")],
            "exit_reason": attack,
            "kernels": attack,
            "ranks": [
                rank.model_copy(update={"host": attack, "memory_bytes": {attack: 5}})
                for rank in summary.ranks
            ],
        }
    )
    hostile.write(tmp_path)
    (tmp_path / "config.yaml").write_text(attack)
    page = _page(tmp_path)
    assert "script" not in {tag for tag, _ in page.elements}
    assert page.words.count(attack) >= 3
    assert "<b>&amp;" in page.words


def test_the_configuration_is_there_with_its_digest(four_ranks, page_of_four):
    content, page = (four_ranks / "config.yaml").read_bytes(), page_of_four
    assert f"sha256 {hashlib.sha256(content).hexdigest()}" in page.words
    assert content.decode().strip() in page.words


def test_more_than_64_ranks_are_shown_by_stage(tmp_path):
    make_run(tmp_path, Layout(tensor=8, pipeline=16, data=2, ranks_per_node=8), layers=32, steps=2)
    page = _page(tmp_path)
    assert "grid of ranks" not in page.figures()
    assert "Above 64 ranks" in page.text
    assert "stage 15 30-31 240-255 30-31" in page.text


def test_a_run_that_wrote_nothing_has_a_report(tmp_path):
    page = _page(tmp_path)
    assert "no end recorded, 0 steps" in page.words
    assert "No step was completed" in page.text


def test_a_killed_run_with_a_torn_line_has_a_report(tmp_path):
    text = step_metrics(1).to_json()
    (tmp_path / "metrics.jsonl").write_text(text + "\n" + text[:40])
    (tmp_path / "summary.json").write_text('{"model": "gpt')
    page = _page(tmp_path)
    assert "no end recorded, 1 step" in page.words
    assert {"loss", "speed", "optimizer", "wire"} <= page.figures()


def test_a_diverged_run_says_since_when(tmp_path):
    good = [step_metrics(step).to_json() for step in (1, 2)]
    bad = [
        step_metrics(s, loss=float("nan"), grad_norm=float("nan"), skipped=True).to_json()
        for s in (3, 4, 5)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(good + bad) + "\n")
    RunSummary(exit_code=1, exit_reason="the loss is not finite").write(tmp_path)
    text = _page(tmp_path).text
    assert "the loss is not finite" in text
    assert "step 2; not finite since" in text
    assert "3 updates skipped" in text


def test_a_run_of_nothing_but_bad_steps_has_a_report(tmp_path):
    line = step_metrics(1, loss=float("nan"), grad_norm=float("inf"), skipped=True).to_json()
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    assert "no finite numbers" in _page(tmp_path).text


def test_of_a_step_made_twice_the_later_counts(tmp_path):
    steps = [step_metrics(1), step_metrics(2, loss=9.0), step_metrics(2, loss=5.0)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(s.to_json() for s in steps))
    history = History.read(tmp_path)
    assert history.steps == [1, 2]
    assert history.last("loss") == 5.0


def test_a_long_run_makes_no_heavy_page(tmp_path):
    lines = [step_metrics(step, sent_bytes={}).to_json() for step in range(1, 5001)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert len(make_report(tmp_path)) < 300_000


def test_the_summary_comes_back_as_it_was(tmp_path):
    written = make_run(tmp_path, SIXTY_FOUR, layers=32, steps=1)
    assert RunSummary.read(tmp_path) == written


@pytest.mark.parametrize(
    ("layers", "words"), [([(0, 3)], "0-3"), ([(2, 2), (6, 7)], "2, 6-7"), ([], "")]
)
def test_layers_of_chunks_in_words(layers, words):
    assert layer_words(layers) == words


def test_the_command_makes_a_report_again(four_ranks, tmp_path):
    for name in ("metrics.jsonl", "summary.json", "config.yaml"):
        (tmp_path / name).write_bytes((four_ranks / name).read_bytes())
    command = [sys.executable, "-m", "frontier_llm", "report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "report.html")
    again, first = (folder / "report.html" for folder in (tmp_path, four_ranks))
    assert again.read_text().replace(tmp_path.name, four_ranks.name) == first.read_text()


def test_the_command_refuses_what_is_no_run_without_a_traceback(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        report_command.main([str(tmp_path / "gone")])
    assert stopped.value.code == 2
    assert "a folder that exists" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_says_what_to_do(tmp_path, capsys):
    (tmp_path / "config.yaml").touch()
    (tmp_path / "report.html.partial").symlink_to("/dev/full")
    assert run_command(lambda: report_command.main([str(tmp_path)])) == 1
    shown = capsys.readouterr().err
    assert "report.html cannot be written: No space left on device\n  do: free space or" in shown
