"""The table and the chart of effective training time are current."""

from docs.generate import goodput_page


def test_the_table_and_the_chart_are_current(capsys):
    assert goodput_page.main([]) == 0, capsys.readouterr().err


def test_an_outdated_page_and_chart_are_reported(tmp_path, monkeypatch, capsys):
    page, chart = tmp_path / "page.md", tmp_path / "chart.svg"
    page.write_text("<!-- goodput -->\n| old |\n<!-- end of goodput -->\n")
    monkeypatch.setattr(goodput_page, "PAGE", page)
    monkeypatch.setattr(goodput_page, "CHART", chart)
    monkeypatch.setattr(goodput_page, "table", lambda: ["| new |"])
    assert goodput_page.main([]) == 1
    err = capsys.readouterr().err
    assert "page.md is not current" in err
    assert "chart.svg is not current" in err
