"""The archive command is run for committed checkpoints, and repeated after a failure."""

import logging
from pathlib import Path

import pytest

from frontier_llm.checkpoint.archive import MOST_WAITING, Archive
from frontier_llm.checkpoint.folders import step_folder
from frontier_llm.config.checkpoint import ArchiveConfig
from tests.forked_train import TINY, train

COUNT = 'echo $(basename "$CHECKPOINT") >> {folder}/tries'
"""Counts a try."""


def archive(folder: Path, command: str, tries: int = 3, every_steps: int = 1) -> Archive:
    """Return an archive whose command first counts its tries, in the file `tries`."""
    config = ArchiveConfig(
        command=f"{COUNT}; {command}".format(folder=folder),
        every_steps=every_steps,
        tries=tries,
        pause_seconds=0.01,
    )
    return Archive(config, folder)


def tries(folder: Path) -> list[int]:
    """Return the step of each try."""
    return [int(line.removeprefix("step_")) for line in (folder / "tries").read_text().split()]


def commit(folder: Path, archive: Archive, step: int) -> None:
    (folder / step_folder(step)).mkdir()
    (folder / step_folder(step) / "content").write_text(str(step))
    archive.committed(step)


def test_a_command_that_fails_the_first_times_is_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = "test $(wc -l < {folder}/tries) -ge 3 && cp -r $CHECKPOINT {folder}/copy"
    found = archive(tmp_path, command)
    with caplog.at_level(logging.INFO):
        commit(tmp_path, found, 7)
        found.wait()
    assert (tmp_path / "copy" / "content").read_text() == "7"
    assert tries(tmp_path) == [7, 7, 7]
    assert found.take_failures() == 2
    assert found.take_failures() == 0
    assert not found.spared()
    pauses = [line.rsplit("next try in ")[-1] for line in caplog.messages if "next try" in line]
    assert pauses == ["10 ms", "30 ms"]
    assert f"{tmp_path / step_folder(7)} is archived" in caplog.messages


def test_a_checkpoint_whose_tries_failed_is_archived_after_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = archive(tmp_path, "test $(wc -l < {folder}/tries) -gt 3")
    commit(tmp_path, found, 1)
    found._writer.wait_below(1)
    assert list(found.spared()) == [1], "it must not be deleted"
    assert "3 of 3 tries have failed" in caplog.text
    commit(tmp_path, found, 2)
    found.wait()
    assert tries(tmp_path) == [1, 1, 1, 2, 1]
    assert not found.spared()


def test_the_end_of_a_run_tries_again_and_says_what_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = archive(tmp_path, "echo no tape >&2; false", tries=2)
    steps = range(1, MOST_WAITING + 2)
    for step in steps:
        commit(tmp_path, found, step)
    found.wait()
    kept = list(steps)[1:]
    assert tries(tmp_path) == [step for step in steps for _ in range(2)] + kept
    assert found.take_failures() == 2 * len(steps) + len(kept)
    assert list(found.spared()) == kept, "a broken command must not fill the disk"
    assert f"{tmp_path / step_folder(1)} is not archived any more" in caplog.text
    assert "exit code 1" in caplog.text
    assert "no tape" in caplog.text
    assert "do: run the command for each of them" in caplog.text


def test_only_multiples_are_archived(tmp_path: Path) -> None:
    found = archive(tmp_path, "true", every_steps=3)
    for step in range(1, 8):
        commit(tmp_path, found, step)
    found.wait()
    assert tries(tmp_path) == [3, 6]


@pytest.mark.slow
def test_a_run_whose_archive_fails_trains_on_and_counts_the_failures(tmp_path: Path) -> None:
    source = Path(__file__).read_text() * 20
    (tmp_path / "text.txt").write_text(source)
    count = COUNT.format(folder=tmp_path)
    command = f"{count}; test $(wc -l < {tmp_path}/tries) -gt 4"
    ended = train(
        *TINY, f"run.dir={tmp_path}/run", f"data.path={tmp_path}/text.txt",
        f"data.directory={tmp_path}/prepared", "trainer.steps=4", "checkpoint.every_steps=2",
        f"checkpoint.tiers.archive.command='{command}'", "checkpoint.tiers.archive.tries=2",
        "checkpoint.tiers.archive.pause_seconds=0.01",
    )  # fmt: skip
    assert ended.code == 0, ended.text
    assert tries(tmp_path)[:2] == [2, 2]
    assert tries(tmp_path)[2:4] == [4, 4]
    assert sorted(tries(tmp_path)[4:]) == [2, 4], "both succeed at the end"
    assert '"archive_failures"' in (tmp_path / "run" / "metrics.jsonl").read_text()
