"""The README shows what the program prints."""

from pathlib import Path

import pytest

from frontier_llm.cli.train import main
from frontier_llm.errors import ConfigError

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.forked
def test_the_readme_shows_the_message_of_a_wrong_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        main(["data.global_batch=7"])
    assert f"```text\n{refused.value}\n```" in README.read_text()
