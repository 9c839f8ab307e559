"""A run whose samples change their length goes on in the corpus where it was."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from frontier_lab.commands.inspect_data import View
from frontier_lab.single_process_model import read_config
from frontier_llm.checkpoint.discovery import find
from frontier_llm.data.batch import digest
from frontier_llm.data.corpora import open_data
from frontier_llm.data.loader import causal_batch
from frontier_llm.data.run_loader import make_windows
from frontier_llm.saving.ledger_file import lengths_of
from tests.forked_train import TINY, train
from tests.trainer.test_resume import read

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> tuple[str, ...]:
    """The overrides of a run whose epoch has a few dozen samples."""
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefgh ", k=draw.randrange(3, 90))) for _ in range(80)]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return (
        *TINY, f"run.dir={tmp_path}/run", f"data.path={tmp_path}/text.jsonl",
        f"data.directory={tmp_path}/prepared", "model.positions=rotary", "data.vocabulary=280",
    )  # fmt: skip


def inputs(run: Path, samples: range) -> Counter[int]:
    """Return how often tokens are inputs of samples."""
    config = read_config(run)
    corpora = open_data(config.data)
    windows = make_windows(config, corpora, train=True)
    windows.set_lengths(lengths_of(run))
    View(config, corpora, run, train=True)  # knows the lengths, too
    found: Counter[int] = Counter()
    for index in samples:
        *others, (start, count) = windows.ranges(index)
        for first, size in [*others, (start, count - 1)]:
            found.update(range(first, first + size))
    return found


def test_what_was_read_in_the_epoch_is_not_read_again(run: tuple[str, ...], tmp_path: Path) -> None:
    allowed, folder = "run.allow_changes=[data.sequence_length]", tmp_path / "run"
    schedule = "optimizer.decay_steps=20"
    for steps, length in ((5, 16), (8, 32), (10, 8)):
        ended = train(*run, schedule, f"trainer.steps={steps}", f"data.sequence_length={length}",
                      allowed)  # fmt: skip
        assert ended.code == 0, ended.text
    # without a change the lengths come from the checkpoint alone
    layout = ("parallel.pipeline=2", "data.micro_batch=2", "data.sequence_length=8")
    assert train(*run, schedule, "trainer.steps=12", *layout).code == 0
    found = [(segment.first_sample, segment.tokens) for segment in lengths_of(folder)]
    assert found == [(0, 16), (20, 32), (32, 8)]
    read_inputs = inputs(folder, range(48))
    assert len(read_inputs) == 20 * 16 + 12 * 32 + 16 * 8, "no token is read twice"
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["samples"], last["tokens"]) == (48, 20 * 16 + 12 * 32 + 16 * 8)
    config = read_config(folder)
    windows = make_windows(config, open_data(config.data), train=True)
    windows.set_lengths(lengths_of(folder))
    for step, first, digest_of_step in read(folder):
        rows = [causal_batch([windows[index]], [index]) for index in range(first, first + 4)]
        assert f"{digest(rows):x}" == digest_of_step, step


@pytest.mark.exhaustive
def test_a_checkpoint_without_lengths_goes_on_in_its_order(
    run: tuple[str, ...], tmp_path: Path
) -> None:
    folder, overrides = tmp_path / "run", (*run, "optimizer.decay_steps=4")
    assert train(*overrides, "trainer.steps=2").code == 0
    checkpoint = find(folder)
    meta = {key: value for key, value in checkpoint.manifest.meta.items() if key != "lengths"}
    del meta["progress"]["tokens"]
    older = checkpoint.manifest.model_copy(update={"meta": meta})
    (checkpoint.folder / "manifest.json").write_bytes(older.to_bytes())
    ended = train(*overrides, "trainer.steps=4")
    assert ended.code == 0, ended.text
    assert [segment.keeps_all for segment in lengths_of(folder)] == [True]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in metrics] == [4 * 32, 8 * 32, 12 * 32, 16 * 32]
    windows = make_windows(read_config(folder), open_data(read_config(folder).data), train=True)
    for step, first, digest_of_step in read(folder):
        rows = [causal_batch([windows[index]], [index]) for index in range(first, first + 4)]
        assert f"{digest(rows):x}" == digest_of_step, step


def test_packed_samples_keep_their_length(run: tuple[str, ...]) -> None:
    packed = (*run, "data.packing=best_fit", "trainer.steps=2", "optimizer.decay_steps=4")
    assert train(*packed).code == 0
    ended = train(*packed, "data.sequence_length=16", "run.allow_changes=[data.sequence_length]")
    assert ended.code == 2, ended.text
    assert "that the run resumes from: best_fit packs all documents anew" in ended.text
    assert "run.init_from=RUN" in ended.text
