"""The page needs no other file and shows what was found."""

import re

from frontier_lab.planning.plan_page import _add_label, make_page
from frontier_lab.planning.search import Goal, search
from frontier_llm.config import decode
from tests.values import tiny_values


def test_the_page_stands_alone_and_names_every_layout():
    config = decode(tiny_values("cluster=a100_80g", "precision=bf16", "planner.pipeline=[2]"))
    found = search(config, Goal(8, 8))
    found.refused["memory <x>"] = 3
    text = make_page("tiny", found, "8 ranks")
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org)", text)
    for estimated in found.best:
        assert estimated.candidate.description in text
    assert "memory &lt;x&gt;" in text
    assert text.count("<svg") == 3  # memory against speed, seconds, pipeline
    assert "stage 1" in text


def test_labels_of_a_chart_do_not_overlap():
    labels = []
    for x, y, text in ((100, 50, "1"), (104, 55, "2"), (118, 50, "3"), (200, 50, "4")):
        _add_label(labels, x, y, text)
    assert labels == [(100, 50, "1, 2, 3"), (200, 50, "4")]
