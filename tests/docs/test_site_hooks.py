"""Check how pages change for the site; mkdocs itself is not needed."""

import logging

import pytest

from docs.generate.site_hooks import fit


@pytest.mark.parametrize(
    ("source", "uri", "before", "after"),
    [
        ("README.md", "index.md", "[a](docs/data.md#a-corpus)", "[a](data.md#a-corpus)"),
        ("README.md", "index.md", "[a](CONTRIBUTING.md)", "[a](contributing.md)"),
        ("README.md", "index.md", "![a](docs/images/faults.svg)", "![a](images/faults.svg)"),
        ("docs/data.md", "data.md", "[a](convert.md)", "[a](convert.md)"),
        ("docs/data.md", "data.md", "[a](../README.md)", "[a](index.md)"),
        ("docs/api/config.md", "api/config.md", "[a](../usage.md)", "[a](../usage.md)"),
        ("CHANGELOG.md", "changelog.md", "[a](docs/usage.md)", "[a](usage.md)"),
        ("docs/data.md", "data.md", "[a](#here) [b](https://c.d)", "[a](#here) [b](https://c.d)"),
        ("docs/data.md", "data.md", "[`a`](../train.py)", "[`a`](URL/blob/main/train.py)"),
        ("README.md", "index.md", "```\n[a](docs/data.md)\n```", "```\n[a](docs/data.md)\n```"),
    ],
)
def test_links_fit_the_site(source, uri, before, after):
    assert fit(before, source, uri, "URL") == after


def test_without_a_repository_a_source_file_is_plain_text():
    assert fit("[`a`](../train.py)", "docs/data.md", "data.md", None) == "`a`"


def test_a_dead_link_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        fit("[a](gone.md)", "docs/data.md", "data.md", None)
    assert "docs/data.md: dead link gone.md" in caplog.text


def test_the_markers_of_tables_are_dropped():
    assert "<!--" not in fit(
        "<!-- a -->\n| b |\n<!-- end of a -->\n", "docs/data.md", "data.md", None
    )
