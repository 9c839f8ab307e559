"""docs/checkpoint.md says what the planner predicts for DataStates-LLM's models."""

import pytest

from docs.generate import checkpoint_page
from docs.generate.checkpoint_page import HEAD, main, row, seconds

pytestmark = pytest.mark.slow


def test_the_page_is_current(capsys):
    assert main([]) == 0, capsys.readouterr().err


def test_a_stale_page_is_an_error(tmp_path, monkeypatch, capsys):
    page = tmp_path / "checkpoint.md"
    page.write_text(checkpoint_page.PAGE.read_text().replace("| 13B | 4 |", "| 13B | 5 |"))
    monkeypatch.setattr(checkpoint_page, "PAGE", page)
    assert main([]) == 1
    assert "python -m docs.generate.checkpoint_page --write" in capsys.readouterr().err


def test_waits_by_hand():
    """7B on two nodes of 4 ranks: a node writes half of 12 bytes per parameter at 1.16 GB/s."""
    plain, none = seconds("datastates_7b", "off", 1)
    blocking, write = seconds("datastates_7b", "blocking", 1)
    lazy, rest = seconds("datastates_7b", "lazy", 1)
    assert none == 0
    assert write == pytest.approx(12 * 6.74e9 / 2 / 1.16e9, rel=0.01)
    assert blocking == pytest.approx(plain + write)
    assert (lazy, rest) == (pytest.approx(write), pytest.approx(write - plain))
    cells = dict(zip(HEAD, row("7b", 98), strict=True))
    assert int(cells["steps that hide a write"]) == -(-write // plain)
    assert 1.8 < float(cells["the same ratio at this interval"]) <= 2
