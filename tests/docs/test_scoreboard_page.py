"""The scoreboard shows what its generators compute."""

import pytest

from docs.generate import scoreboard_page
from docs.generate.blocks import ROOT
from docs.generate.scoreboard_page import Figure

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("section", "figures"), [
    ("datastates", scoreboard_page._datastates),
    ("zeropp", scoreboard_page._zeropp),
    ("mt5", scoreboard_page._mt5),
])  # fmt: skip
def test_a_table_is_current(section, figures):
    expected = "\n".join(scoreboard_page._table(figures))
    page = (ROOT / "docs" / "scoreboard.md").read_text()
    assert f"<!-- {section} -->\n{expected}\n<!-- end of {section} -->" in page


def test_columns_without_cells_are_left_out():
    figures = [Figure("a", "1", note="why"), Figure("b", "2")]
    lines = list(scoreboard_page._table(lambda: figures))
    assert lines == [
        "| quantity | published | note |",
        "|---|---|---|",
        "| a | 1 | why |",
        "| b | 2 |  |",
    ]


def test_a_faster_network_gains_less_from_quantised_messages():
    slow, fast = (scoreboard_page._zeropp_gain("", "", gbits).predicted for gbits in (50, 800))
    assert float(slow.rstrip("x")) > float(fast.rstrip("x")) > 1
