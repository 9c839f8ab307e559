"""A run on a corpus with changed bytes ends, and says which steps have read them."""

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from frontier_llm.config.run import RunConfig
from frontier_llm.data import corpus_manifest
from frontier_llm.data.corpus_manifest import NOTE_FILE
from frontier_llm.data.prepare import prepare
from frontier_llm.data.prepared_corpus import Samples, open_corpus
from frontier_llm.data.run_loader import window_corpus
from frontier_llm.data.sample_order import LengthSegment
from frontier_llm.errors import DataError
from frontier_llm.trainer.callbacks import run_checks
from frontier_llm.trainer.callbacks.run_checks import CorpusIntegrity
from frontier_llm.trainer.progress import Progress
from tests.data.conftest import config, write_jsonl
from tests.data.test_corpus_check import flip
from tests.forked_train import TINY, train
from tests.values import tiny_values

STEPS = 6


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(corpus_manifest, "BLOCK_BYTES", 64)
    monkeypatch.setattr(corpus_manifest, "MIB", 64)
    return prepare(config(tmp_path / "corpus", write_jsonl(tmp_path / "text.jsonl", 80)), workers=1)


CONFIG = RunConfig.model_validate(
    tiny_values("data.sequence_length=16", "data.global_batch=4", "data.micro_batch=2")
)
ONE_LENGTH, CHANGED = (LengthSegment(0, 16),), (LengthSegment(0, 32), LengthSegment(8, 16))


def windows(folder: Path, lengths: Sequence[LengthSegment]) -> Samples:
    """Return the training samples of a run."""
    samples = cast(Samples, window_corpus(CONFIG, open_corpus(folder), train=True))
    samples.set_lengths(lengths)
    return samples


def checked(
    folder: Path,
    rank: int = 0,
    lengths: Sequence[LengthSegment] = ONE_LENGTH,
    *,
    waits: bool = True,
) -> CorpusIntegrity:
    """Return the callback after it has read all files, if the caller waits for it."""
    context = SimpleNamespace(
        config=CONFIG,
        world=SimpleNamespace(rank=rank),
        progress=Progress(step=STEPS, next_sample=4 * STEPS),
        data=SimpleNamespace(
            corpus=SimpleNamespace(corpora=(open_corpus(folder),)),
            windows=windows(folder, lengths),
        ),
    )
    callback = CorpusIntegrity(cast(Any, context))
    callback.on_start(1.0, None)
    if rank == 0 and waits:
        callback._thread.join()
    return callback


def test_a_good_corpus_is_read_once_by_one_rank(folder: Path) -> None:
    checked(folder, rank=1).on_step_end(cast(Any, None))
    assert not (folder / NOTE_FILE).exists()
    callback = checked(folder)
    callback.on_step_end(cast(Any, None))
    callback.close()
    assert (folder / NOTE_FILE).exists()


@pytest.mark.parametrize("lengths", [ONE_LENGTH, CHANGED])
@pytest.mark.parametrize("step", [1, 4, STEPS + 3])
def test_the_first_step_that_has_read_damaged_bytes_is_named(
    step: int, lengths: Sequence[LengthSegment], folder: Path
) -> None:
    """A block of 64 bytes holds 32 tokens, which some other window may share."""
    samples = windows(folder, lengths)
    start, _ = samples.ranges(4 * (step - 1))[0]
    block = range(start * 2 // 64 * 32, start * 2 // 64 * 32 + 32)
    readers = [
        index // 4 + 1
        for index in range(len(samples))
        for first, count in samples.ranges(index)
        if first < block.stop and first + count > block.start
    ]
    flip(folder / "train.bin", start * 2)
    with pytest.raises(DataError) as raised:
        checked(folder, lengths=lengths).on_step_end(cast(Any, None))
    message = str(raised.value)
    assert f"{folder}/train.bin is damaged" in message
    assert f"in bytes {2 * block.start} to {2 * block.stop}" in message
    if min(readers) > STEPS:
        assert "no step so far has read these bytes" in message
    else:
        assert f"steps {min(readers)} to {STEPS} may have read these bytes" in message


@pytest.mark.parametrize("is_early", [False, True])
def test_a_run_that_ends_first_reads_on_or_says_so(
    folder: Path, is_early: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_checks, "_BYTES_PER_SECOND", 1)  # a minute for one block
    damage_validation(folder)
    callback = checked(folder, waits=False)
    with nullcontext() if is_early else pytest.raises(DataError, match="may be wrong"):
        callback.on_stop(is_early=is_early)
    said = "ended before its prepared corpus was compared with its digests"
    assert (said in caplog.text) == is_early
    callback.close()
    assert not callback._thread.is_alive()


def damage_validation(folder: Path) -> None:
    flip(folder / "validation.bin", 0)


def remove_index(folder: Path) -> None:
    (folder / "train.places").unlink()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (damage_validation, "validation losses so far may be wrong"),
        (remove_index, "cannot be read"),
    ],
)
def test_other_damage(edit: Callable[[Path], None], message: str, folder: Path) -> None:
    callback = checked(folder)
    (folder / NOTE_FILE).unlink()
    edit(folder)
    check = threading.Thread(target=callback._check)  # it lowers the priority of its thread
    check.start()
    check.join()
    with pytest.raises(DataError, match=message):
        callback.on_stop(is_early=False)


def test_a_run_on_changed_bytes_ends_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(f"line {n} of a text" for n in range(3000)))
    tiny = (*TINY, f"data.path={tmp_path}/text.txt", f"data.directory={tmp_path}/prepared")
    assert train(*tiny, f"run.dir={tmp_path}/a", "trainer.steps=1").code == 0
    (file,) = (tmp_path / "prepared").glob("*/train.bin")
    flip(file, file.stat().st_size - 2)
    for run, steps in (("b", 40), ("c", 1)):
        ended = train(*tiny, f"run.dir={tmp_path}/{run}", f"trainer.steps={steps}")
        assert ended.code == 1, ended.text
        assert f"{file} is damaged: its content has changed" in " ".join(ended.text.split())
        assert "Traceback" not in ended.text
        assert json.loads((tmp_path / run / "summary.json").read_text())["exit_code"] == 1
