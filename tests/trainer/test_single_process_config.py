"""The configuration of a run as other commands read it, also from another folder."""

import shutil
from pathlib import Path

import pytest

from frontier_lab.single_process_model import read_config
from frontier_llm.cli.compose import compose
from frontier_llm.saving.run_directory import to_yaml


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Start a run in a folder that has its text: only config.yaml is written."""
    folder = tmp_path / "start" / "runs" / "mine"
    folder.mkdir(parents=True)
    words = ["data=blend", "data.corpora=[{name: a, path: a.txt}, {name: b, path: /b.txt}]"]
    text = to_yaml(compose([*words, "run.dir=runs/mine", "data.directory=prepared"]))
    (folder / "config.yaml").write_text(text)
    (tmp_path / "start" / "a.txt").touch()
    (tmp_path / "start" / "prepared").mkdir()
    return folder


def test_relative_paths_begin_where_the_run_was_started(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tmp_path / "start"
    for here, given in ((tmp_path, run), (start, Path("runs/mine")), (run, Path())):
        monkeypatch.chdir(here)
        data = read_config(given).data
        assert [corpus.path for corpus in data.corpora] == [str(start / "a.txt"), "/b.txt"]
        assert data.directory == str(start / "prepared")


def test_paths_stay_as_they_are_if_the_start_is_not_known(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    (run.parents[1] / "a.txt").unlink()
    for folder in (copy, run):
        assert [corpus.path for corpus in read_config(folder).data.corpora] == ["a.txt", "/b.txt"]
