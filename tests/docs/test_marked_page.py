"""Tables that tools make, in pages that people write."""

import pytest

from docs.generate.marked_page import filled, keep_current

PAGE = """above
<!-- one -->
old
<!-- end of one -->
between
<!-- two -->
<!-- end of two -->
below
"""


def keep(arguments, wanted):
    return keep_current("What it does.", "docs.generate.x", arguments, lambda: wanted)


def test_what_is_written_by_hand_stays():
    wanted = PAGE.replace("old", "1\n2")
    assert filled(PAGE, {"one": iter(["1", "2"])}) == wanted
    assert filled(wanted, {"one": ["1", "2"]}) == wanted
    assert filled(PAGE, {"two": ["x"]}) == PAGE.replace("<!-- end of two", "x\n<!-- end of two")


@pytest.mark.parametrize("missing", ["<!-- one -->\n", "<!-- end of one -->"])
def test_a_page_without_a_marker_is_refused(missing):
    with pytest.raises(ValueError, match="markers of one"):
        filled(PAGE.replace(missing, ""), {"one": ["1"]})


def test_a_stale_file_is_named_with_what_to_do(tmp_path, capsys):
    wanted = {tmp_path / "page.md": "new", tmp_path / "images" / "a.svg": "drawn"}
    (tmp_path / "page.md").write_text("old")
    assert keep([], wanted) == 1
    said = capsys.readouterr().err
    assert said.splitlines() == [
        "page.md is not current: python -m docs.generate.x --write",
        "a.svg is not current: python -m docs.generate.x --write",
    ]
    assert keep(["--write"], wanted) == 0
    assert keep([], wanted) == 0


def test_what_is_not_understood_is_refused_before_anything_is_made(capsys):
    def make():
        raise AssertionError("slow work")

    with pytest.raises(SystemExit, match="2"):
        keep_current("What it does.", "docs.generate.x", ["--wirte"], make)
    with pytest.raises(SystemExit, match="0"):
        keep_current("What it does.", "docs.generate.x", ["--help"], make)
    assert "What it does." in capsys.readouterr().out
