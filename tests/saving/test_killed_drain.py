"""A drain that was killed goes on: what it has copied is not copied again."""

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.drain import DrainSource
from frontier_llm.checkpoint.kill_points import VARIABLE
from frontier_llm.checkpoint.node_parts import copy_file
from frontier_llm.checkpoint.rank_file import RankFile
from frontier_llm.trainer.loop import Loop
from tests.forked_train import Training, train
from tests.patience import wait_until
from tests.saving.test_drain import (
    direct,
    events,
    files,
    flip,
    losses,
    nodes,
    stop_after_6,
    tiny,
)

pytestmark = pytest.mark.slow
__all__ = ["direct", "tiny"]  # fixtures
EVERY_4 = "checkpoint.tiers.local.every_steps=4"
PAGE = 4096


class Counts:
    """Counts the bytes that the ranks of runs write to the run directory by drains."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._log, self._slow = folder / "drained.jsonl", folder / "slow"
        self._held = folder / "held"
        self._log.touch()
        write, finish, chunks = RankFile._write, RankFile.finish, DrainSource.chunks
        train_step = Loop._step

        def counted(file: RankFile, content: memoryview) -> None:
            self._note(file, "written", len(content))
            write(file, content)

        def finished(file: RankFile) -> Any:
            part = finish(file)
            self._note(file, "finished", part.size)
            return part

        def late(source: DrainSource) -> Any:
            if self._slow.exists() and source._plan.name[5:10] in ("00002", "00003"):
                threading.Event().wait()
            return chunks(source)

        def held(loop: Loop, step: int) -> bool:
            if self._held.exists() and step > 6:
                threading.Event().wait()
            return train_step(loop, step)

        monkeypatch.setattr(Loop, "_step", held)
        monkeypatch.setattr(RankFile, "_write", counted)
        monkeypatch.setattr(RankFile, "finish", finished)
        monkeypatch.setattr(DrainSource, "chunks", late)

    def hold(self) -> None:
        """Let training wait after step 6, so that the run is killed before it saves step 8."""
        self._held.touch()

    def slow_down(self) -> None:
        """Let the drains of ranks 2 and 3 hang."""
        self._slow.touch()

    def take(self, what: str = "written") -> Counter[str]:
        """Return the bytes by file since the last call, of drains only."""
        found = Counter[str]()
        for line in map(json.loads, self._log.read_text().splitlines()):
            if line["what"] == what:
                found[line["file"]] += line["bytes"]
        return found

    def reset(self) -> None:
        """Forget all counts, and let neither drains nor training wait."""
        self._log.write_text("")
        self._slow.unlink(missing_ok=True)
        self._held.unlink(missing_ok=True)

    def _note(self, file: RankFile, what: str, count: int) -> None:
        if threading.current_thread().name == "drain":
            with self._log.open("a") as stream:
                line = {"file": file._path.name, "what": what, "bytes": count}
                stream.write(json.dumps(line) + "\n")


def pages(count: int) -> int:
    return -(-count // PAGE) * PAGE


def test_files_that_a_killed_drain_has_copied_are_not_copied_again(
    tiny: tuple[str, ...], direct: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counts(tmp_path, monkeypatch)
    counts.slow_down()
    counts.hold()
    run = Training(*tiny, *nodes(tmp_path, EVERY_4), "trainer.steps=8")
    wait_until(lambda: len(counts.take("finished")) >= 2, "two files")
    saved = f"local/*/*/step_{4:08d}/manifest.json"
    wait_until(lambda: len(list(tmp_path.glob(saved))) == 2, "step 4 on the disks of both nodes")
    run.kill()
    run.wait()
    copied = set(counts.take("finished"))
    assert copied == {"rank_00000.safetensors", "rank_00001.safetensors"}
    counts.reset()

    ended = train(*tiny, *nodes(tmp_path, EVERY_4), "trainer.steps=8")
    assert ended.code == 0, ended.text
    assert events(tmp_path / "run", "resume")[-1]["step"] == 4
    step = Path("checkpoints", "step_00000004")
    wanted = files(direct / step)
    assert files(tmp_path / "run" / step) == wanted, ended.text
    left = {name: pages(len(wanted[name])) for name in wanted.keys() - copied}
    assert len(left) == 2
    assert counts.take() == left, "bytes written by the second drain"
    assert losses(tmp_path / "run") == losses(direct)


@pytest.mark.exhaustive
def test_a_damaged_copy_of_a_killed_drain_is_written_again(
    tiny: tuple[str, ...], direct: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is killed when all files are on disk. Then a byte of one of them flips."""
    counts = Counts(tmp_path, monkeypatch)
    monkeypatch.setenv(VARIABLE, "sealed@0+drain")
    counts.hold()
    assert train(*tiny, *nodes(tmp_path, EVERY_4), "trainer.steps=8").code != 0
    monkeypatch.delenv(VARIABLE)
    counts.reset()
    flip(tmp_path / "run" / "checkpoints" / "step_00000004.partial" / "rank_00003.safetensors")
    ended = train(*tiny, *nodes(tmp_path, EVERY_4), "trainer.steps=8")
    assert ended.code == 0, ended.text
    step = Path("checkpoints", "step_00000004")
    wanted = files(direct / step)
    assert files(tmp_path / "run" / step) == wanted, ended.text
    name = "rank_00003.safetensors"
    assert counts.take() == {name: pages(len(wanted[name]))}


def test_a_repeated_copy_keeps_what_is_already_copied(
    tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after_6(tiny, tmp_path)
    (local,) = (tmp_path / "local").glob("*/node_00001/step_00000006")
    name = "rank_00002.safetensors"
    target = tmp_path / "copy" / name
    written, write = list[int](), RankFile._write

    def noted(file: RankFile, content: memoryview) -> None:
        written.append(len(content))
        write(file, content)

    monkeypatch.setattr(RankFile, "_write", noted)
    for _ in range(2):
        copy_file(Checkpoint.open(local), name, target)
        assert target.read_bytes() == (local / name).read_bytes()
    assert written == [pages(target.stat().st_size)], "the second copy writes nothing"
