"""timeline.json, and the section of the report that draws it."""

import re
from pathlib import Path

import pytest

from frontier_llm.geometry.pipeline_schedule import make_schedule
from frontier_llm.planner.timeline import ActionSeconds, Send, action_times
from frontier_llm.telemetry import report_sections, step_timeline
from frontier_llm.telemetry.report_page import make_report
from frontier_llm.telemetry.report_sections import pipeline_section
from frontier_llm.telemetry.step_timeline import TIMELINE_FILE, PassTimeline, StepTimeline
from frontier_llm.telemetry.summary import Layout, RunSummary
from tests.telemetry.runs import make_run
from tests.telemetry.test_report_page import Page

SCHEDULE = make_schedule("1f1b", 2, 1, 2, 0, False)
BOX = re.compile(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)" height="20"')


def passes(seconds: float = 1.0) -> PassTimeline:
    """Two stages whose forward passes take `seconds`, and backward passes twice as long."""
    each = ActionSeconds(seconds, 2 * seconds, seconds, seconds)
    times = action_times(SCHEDULE, [[each], [each]], Send())
    busy = [sum(end - start for start, end in stage_times) for stage_times in times]
    return PassTimeline.of(SCHEDULE, times, busy, [stage_times[-1][1] for stage_times in times])


def section(planned: PassTimeline | None, measured: PassTimeline, stages: int = 2) -> str:
    timeline = StepTimeline(step=3, measured=measured, planned=planned)
    return "".join(pipeline_section(RunSummary(layout=Layout(pipeline=stages)), timeline))


def test_the_waiting_share_is_that_of_a_pipeline_with_equal_passes() -> None:
    timeline = passes()
    assert timeline.seconds == 9  # 2 micro-batches, and those of one other stage
    assert timeline.waiting_share == pytest.approx(1 / 3)


@pytest.mark.parametrize("ends", [[5.0, 8.0], [8.0, 5.0]])
def test_the_stage_that_ends_last_ends_the_step(ends: list[float]) -> None:
    timeline = PassTimeline.of(SCHEDULE, [[(0.0, 4.0)]] * 2, [4.0, 4.0], ends)
    assert timeline.seconds == 8
    assert timeline.waiting_share == 0.5


def test_each_action_has_its_stage_and_its_times() -> None:
    actions = SCHEDULE.actions
    events = [action.event for action in passes().actions]
    assert [e.action for e in events] == [*actions[0], *actions[1]]
    assert [e.stage for e in events] == [0] * 4 + [1] * 4
    assert [(e.start, e.end) for e in events[4:]] == [(1, 2), (2, 4), (4, 5), (5, 7)]


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    timeline = StepTimeline(step=3, measured=passes(2.0), planned=passes())
    timeline.write(tmp_path)
    assert StepTimeline.read(tmp_path) == timeline
    (tmp_path / TIMELINE_FILE).write_text('{"step": 3')
    assert StepTimeline.read(tmp_path) is None


def test_the_report_draws_the_file(tmp_path: Path) -> None:
    make_run(tmp_path, Layout(pipeline=2), steps=4)
    StepTimeline(step=3, measured=passes(2.0), planned=passes()).write(tmp_path)
    page = Page(make_report(tmp_path))
    assert {"planned pipeline", "measured pipeline"} <= page.figures()
    assert "33.3% (planned) and 33.3% (measured)" in page.text
    assert "The step is longer" not in page.text


def test_both_pictures_have_the_same_time_axis() -> None:
    planned, measured = section(passes(), passes(2.0)).split("<h3>Measured</h3>")
    boxes = [
        [(float(x), float(x) + float(width)) for x, width in BOX.findall(picture)]
        for picture in (planned, measured)
    ]
    assert len(boxes[0]) == len(boxes[1]) == 8
    left = min(boxes[0])[0]
    ends = [max(end for _, end in of_picture) for of_picture in boxes]
    assert ends[1] - left == pytest.approx(2 * (ends[0] - left), abs=0.1)
    assert planned.count("seconds 0 to 18") == measured.count("seconds 0 to 18") == 1


def test_an_unknown_plan_is_not_drawn() -> None:
    html = section(None, passes())
    assert "planned" not in html.lower()
    assert "measured pipeline" in html
    assert "33.3% (measured)" in html


def test_a_timeline_of_another_layout_is_not_drawn() -> None:
    assert section(passes(), passes(), stages=1) == ""
    assert section(passes(), passes(), stages=4) == ""


def test_a_long_step_is_cut_and_keeps_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = passes()
    for module in (step_timeline, report_sections):
        monkeypatch.setattr(module, "RECORDED_ACTIONS", 3)
    cut = passes()
    assert cut.waiting_share == whole.waiting_share
    assert cut.actions == [*whole.actions[:3], *whole.actions[4:7]]
    assert "the first 3 passes of each stage are drawn" in section(None, cut)
