"""A run that goes on is the run that never stopped; what cannot go on says why."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from frontier_lab.commands.inspect_data import View
from frontier_lab.single_process_model import read_config
from frontier_lab.stored_weights import read_tensor
from frontier_llm.checkpoint import save
from frontier_llm.checkpoint.discovery import Checkpoint, find
from frontier_llm.checkpoint.folders import committed
from frontier_llm.data.batch import digest
from frontier_llm.data.corpora import BlendedSamples, open_data
from frontier_llm.data.loader import causal_batch
from frontier_llm.data.run_loader import make_batch_maker, make_windows
from frontier_llm.data.sentencepiece_tokenizer import train_tokenizer
from frontier_llm.errors import CheckpointError
from frontier_llm.health.watchdog import Watchdog
from frontier_llm.saving import run_directory
from frontier_llm.saving.ledger_file import LedgerFile, blend_of
from tests.conftest import mount
from tests.covering import covering
from tests.forked_train import TINY, Training, train
from tests.texts import paragraphs, prose

pytestmark = pytest.mark.slow

STEPS = 8
SCHEDULE = ("optimizer.decay_steps=8", "optimizer.warmup_steps=2")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The overrides of a tiny run on a small corpus of its own."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text(prose(40))
    where = (f"data.path={folder}/text.txt", f"data.directory={folder}/prepared")
    return (*TINY, *SCHEDULE, *where)


@pytest.fixture(scope="module")
def whole(tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbs, with dropout."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    ended = train(*tiny, f"run.dir={folder}", f"trainer.steps={STEPS}", "model.dropout=0.1")
    assert ended.code == 0, ended.text
    return folder


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def learned(run: Path) -> list[tuple[int, float, float, int]]:
    """What each step was, without what it took."""
    return [(m["step"], m["loss"], m["grad_norm"], m["samples"]) for m in lines(run)]


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [entry for entry in lines(run, "ledger.jsonl") if entry.get("event") == name]


def read(run: Path) -> list[tuple[int, int, str]]:
    """The samples of each step; of a step that was made again, those that counted."""
    found = {e["step"]: e for e in lines(run, "ledger.jsonl") if "digest" in e}
    return [(step, e["first_sample"], e["digest"]) for step, e in sorted(found.items())]


def same_states(one: Path, other: Path) -> bool:
    a, b = find(one), find(other)
    assert a.manifest.tensors.keys() == b.manifest.tensors.keys()
    return all(
        state.equal(read_tensor(b, name)[kind])
        for name in a.manifest.tensors
        for kind, state in read_tensor(a, name).items()
    )


@pytest.mark.exhaustive
def test_a_lower_number_of_checkpoints_makes_room_for_the_next(
    tiny: tuple[str, ...], tmp_path: Path
) -> None:
    """A disk with room for three of them; the newest is never deleted before it was loaded."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount(disk, "size=64m")
    try:
        words = (*tiny, f"run.dir={disk}/run", "checkpoint.every_steps=1", "checkpoint.keep=4")
        assert train(*words, "trainer.steps=3").code == 0
        with (disk / "other").open("wb") as other, suppress(OSError):
            other.write(bytes(64 << 20))
        ended = train(*tiny, f"run.dir={disk}/other_run", "trainer.steps=4")
        assert "do:     choose another run.dir, or free space there" in ended.text
        os.truncate(disk / "other", (disk / "other").stat().st_size - (64 << 10))
        ended = train(*words, "trainer.steps=4")
        assert "free, a checkpoint takes" in ended.text
        assert "lower checkpoint.keep if older checkpoints take it" in ended.text
        steps = [step for step, _ in committed(disk / "run" / "checkpoints")]
        assert steps == [3, 2, 1], "a run that does not resume deletes nothing"
        ended = train(*words, "trainer.steps=4", "checkpoint.keep=1")
        assert ended.code == 0, ended.text
        assert [step for step, _ in committed(disk / "run" / "checkpoints")] == [4]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.exhaustive
def test_a_blend_gets_corpora_that_were_not_ready_at_the_start(tmp_path: Path) -> None:
    """In another order of names; the order of samples in each corpus does not change."""
    for number, name in enumerate("abc"):
        (tmp_path / f"{name}.txt").write_text(prose(20, 20 * number))
    tokenizer = tmp_path / "tokenizer.model"
    train_tokenizer([(tmp_path / "a.txt").read_text()], 300, tokenizer)

    def overrides(steps: int, names: str) -> tuple[str, ...]:
        corpora = ", ".join(f"{{name: {x}, path: {tmp_path}/{x}.txt, weight: 1}}" for x in names)
        blend = ("data=blend", f"data.directory={tmp_path}/prepared", f"data.tokenizer={tokenizer}")
        run = (f"run.dir={tmp_path}/run", f"trainer.steps={steps}", f"data.corpora=[{corpora}]")
        others = (word for word in TINY if word not in ("data=text", "data.vocabulary=300"))
        return (*others, *SCHEDULE, *blend, *run)

    assert train(*overrides(1, "b")).code == 0
    allowed = "run.allow_changes=[data.corpora]"
    assert train(*overrides(2, "ab"), allowed).code == 0
    ended = train(*overrides(5, "cba"), allowed)
    assert ended.code == 0, ended.text
    run = tmp_path / "run"
    assert [s["first_sample"] for s in events(run, "blend")[-1]["segments"]] == [0, 4, 8]
    config = read_config(run)
    view = View(config, open_data(config.data), run, train=True)
    shown = [str(next(view.lines(index))) for index in range(4 * 5)]
    assert len(set(shown)) == 20, "a window was read twice"
    assert [line[0] for line in shown].count("c") == pytest.approx(4, abs=1)
    assert "c" not in {line[0] for line in shown[:8]}
    windows = make_windows(config, open_data(config.data), train=True)
    assert isinstance(windows, BlendedSamples)
    windows.resume(blend_of(run), 20)
    for step, first, found in read(run):
        rows = [causal_batch([windows[index]], [index]) for index in range(first, first + 4)]
        assert f"{digest(rows):x}" == found, step
    ended = train(*overrides(6, "ca"), allowed)
    assert "also the corpora that the run has read: a, b, c" in ended.text


@pytest.mark.parametrize("mode", covering(["lazy", "blocking"], ["blocking"]))
def test_killed_and_resumed_is_never_stopped_to_the_bit(
    mode: str, tiny: tuple[str, ...], whole: Path, tmp_path: Path
) -> None:
    """Killed by -9 while checkpoints are being written, in fp32, with dropout."""
    run = tmp_path / "run"
    overrides = (
        *tiny, f"run.dir={run}", f"trainer.steps={STEPS}", "model.dropout=0.1",
        f"checkpoint={mode}", "checkpoint.every_steps=1",
    )  # fmt: skip
    first = Training(*overrides)
    wait_for(run / "checkpoints" / "step_00000003" / "manifest.json")
    first.kill()
    first.wait()
    ended = train(*overrides)
    assert ended.code == 0, ended.text
    assert "resumed" in ended.text
    assert learned(run) == learned(whole)
    assert read(run) == read(whole)
    assert same_states(run, whole)
    (event,) = events(run, "resume")
    assert event["step"] >= 3
    assert event["changes"] == {}


@pytest.mark.exhaustive
def test_killed_and_resumed_with_four_bits_is_never_stopped_to_the_bit(
    tiny: tuple[str, ...], tmp_path: Path
) -> None:
    """Between nodes, with rounding errors that are kept; no step sends parameters in full alone."""
    keys = (
        *tiny, f"trainer.steps={STEPS}", "parallel.pipeline=1", "sharding=zeropp",
        "collectives=four_bits", "launch.ranks_per_node=1", "checkpoint.every_steps=3",
    )  # fmt: skip
    alone, run = tmp_path / "alone", tmp_path / "run"
    ended = train(*keys, f"run.dir={alone}")
    assert ended.code == 0, ended.text
    first = Training(*keys, f"run.dir={run}")
    wait_for(run / "checkpoints" / "step_00000003" / "manifest.json")
    first.kill()
    first.wait()
    ended = train(*keys, f"run.dir={run}")
    assert ended.code == 0, ended.text
    assert "resumed" in ended.text
    assert learned(run) == learned(alone)
    assert same_states(run, alone)


@pytest.mark.exhaustive
def test_killed_under_one_schedule_goes_on_under_another(
    tiny: tuple[str, ...], tmp_path: Path
) -> None:
    """The first stage of zb_v holds the first and the last layers; a table of it is read twice."""
    keys = (*tiny, f"trainer.steps={STEPS}", "model.layers=4", "model.dropout=0.1")
    alone = train(*keys, f"run.dir={tmp_path}/alone", "parallel.schedule=1f1b")
    assert alone.code == 0, alone.text
    run = tmp_path / "run"
    folded = Training(
        *keys, f"run.dir={run}", "parallel.chunks=2", "parallel.schedule=zb_v",
        "checkpoint.every_steps=1",
    )  # fmt: skip
    wait_for(run / "checkpoints" / "step_00000003" / "manifest.json")
    folded.kill()
    folded.wait()
    ended = train(
        *keys, f"run.dir={run}", "parallel.chunks=2", "parallel.schedule=interleaved",
        "parallel.waiting_weights=1",
    )  # fmt: skip
    assert ended.code == 0, ended.text
    assert "changed    parallel.schedule: zb_v -> interleaved" in ended.text
    for mine, wanted in zip(learned(run), learned(tmp_path / "alone"), strict=True):
        assert mine == pytest.approx(wanted, rel=1e-5)
    assert read(run) == read(tmp_path / "alone")


def wait_for(path: Path) -> None:
    Training.wait_until(path.exists, str(path))


@pytest.fixture(scope="module")
def half(tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half a run, with checkpoints of steps 2 and 4."""
    run = tmp_path_factory.mktemp("half") / "run"
    ended = train(*tiny, f"run.dir={run}", "trainer.steps=4", "checkpoint.every_steps=2")
    assert ended.code == 0, ended.text
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [
        "step_00000002", "step_00000004",
    ]  # fmt: skip
    return run


@pytest.fixture
def copied(half: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(half, tmp_path / "run"))


def test_replicas_write_equal_parts(tiny: tuple[str, ...], tmp_path: Path) -> None:
    keys = ("parallel.pipeline=1", "launch.ranks=2", "trainer.steps=1", "model.vocabulary=512")
    ended = train(*tiny, *keys, f"run.dir={tmp_path}/run")
    assert ended.code == 0, ended.text
    files = sorted((tmp_path / "run" / "checkpoints").glob("*/*.safetensors"))
    assert [file.name for file in files] == ["rank_00000.safetensors", "rank_00001.safetensors"]
    first, second = (sum(t.numel() for t in load_file(file).values()) for file in files)
    assert abs(first - second) <= 3


def test_another_layout_goes_on_as_the_same_run(
    tiny: tuple[str, ...], copied: Path, tmp_path: Path
) -> None:
    """Saved by a pipeline of two, read by tensor parallel ranks under zero3."""
    alone = train(*tiny, f"run.dir={tmp_path}/alone", f"trainer.steps={STEPS}")
    assert alone.code == 0, alone.text
    ended = train(
        *tiny, f"run.dir={copied}", f"trainer.steps={STEPS}", "launch.ranks=4",
        "parallel.tensor=2", "parallel.pipeline=1", "sharding=zero3", "run.resume=required",
    )  # fmt: skip
    assert ended.code == 0, ended.text
    assert "changed    parallel.tensor: 1 -> 2" in ended.text
    assert [m[0] for m in learned(copied)] == list(range(1, STEPS + 1))
    for mine, wanted in zip(learned(copied), learned(tmp_path / "alone"), strict=True):
        assert mine == pytest.approx(wanted, rel=1e-4)
    assert read(copied) == read(tmp_path / "alone")


def test_a_change_of_what_is_learned_must_be_allowed(tiny: tuple[str, ...], copied: Path) -> None:
    going_on = (*tiny, f"run.dir={copied}", "trainer.steps=5")
    changed = ("optimizer.learning_rate=1e-3", "data.global_batch=8")
    ended = train(*going_on, *changed)
    assert ended.code == 2
    assert "run.allow_changes=[" in ended.text
    assert "data.global_batch" in ended.text
    assert "Traceback" not in ended.text
    ended = train(*going_on, *changed, "run.allow_changes=[data.global_batch,optimizer]")
    assert ended.code == 0, ended.text
    assert "changed    data.global_batch: 4 -> 8" in ended.text
    assert "settings from step 0 on (cosine: " in ended.text
    assert lines(copied, "ledger.jsonl")[-1]["first_sample"] == 16
    (event,) = events(copied, "resume")
    assert event["changes"]["optimizer.learning_rate"][1] == 1e-3


def test_the_summary_counts_all_starts_and_a_run_without_steps_leaves_it(
    tiny: tuple[str, ...], copied: Path
) -> None:
    on = (*tiny, f"run.dir={copied}", "trainer.steps=6", "checkpoint.every_steps=2")
    before = (copied / "summary.json").read_bytes()
    assert train(*tiny, f"run.dir={copied}", "trainer.steps=4").code == 0
    assert (copied / "summary.json").read_bytes() == before
    assert train(*on).code == 0
    summary, recorded = json.loads((copied / "summary.json").read_text()), lines(copied)
    assert len(recorded) == 6
    assert summary["seconds"] == pytest.approx(sum(m["step_seconds"] for m in recorded))
    assert (summary["tokens"], summary["final_loss"]) == (6 * 4 * 32, recorded[-1]["loss"])
    assert summary["validation_loss"] == recorded[-1]["validation_loss"]
    # a run that was killed after its last checkpoint has its figures from the recorded steps
    cut = {**summary, "tokens": None, "seconds": None, "final_loss": None, "exit_code": None}
    (copied / "summary.json").write_text(json.dumps(cut))
    assert train(*on).code == 0
    again = json.loads((copied / "summary.json").read_text())
    names = ("tokens", "seconds", "final_loss", "validation_loss", "exit_code")
    assert [again[name] for name in names] == [summary[name] for name in names]


def test_another_corpus_must_be_allowed(
    tiny: tuple[str, ...], copied: Path, tmp_path: Path
) -> None:
    (tmp_path / "other.txt").write_text(prose(40, 40))
    other = (*tiny, f"run.dir={copied}", "trainer.steps=5", f"data.path={tmp_path}/other.txt")
    ended = train(*other)
    assert ended.code == 2
    assert "the corpus that the run has read so far" in ended.text
    ended = train(*other, "run.allow_changes=[data.path]")
    assert ended.code == 2, "the tokens would have other meanings"
    advice = re.search(r"same tokens: '(\S+)' (data\.tokenizer=\S+) ", ended.text)
    assert advice is not None
    other = tuple(word for word in other if not word.startswith("data.vocabulary="))
    ended = train(*other, *advice.groups())
    assert ended.code == 0, ended.text
    assert "changed their meaning" not in ended.text


@pytest.mark.exhaustive
def test_a_blends_weights_may_change_and_nothing_is_read_twice(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 20)):
        (tmp_path / f"{name}.txt").write_text(prose(20, first))

    def overrides(steps: int, shares: tuple[int, int]) -> tuple[str, ...]:
        corpora = ", ".join(
            f"{{name: {name}, path: {tmp_path}/{name}.txt, weight: {share}}}"
            for name, share in zip("ab", shares, strict=True)
        )
        blend = ("data=blend", "data.vocabulary=300", f"data.directory={tmp_path}/prepared")
        run = (f"run.dir={tmp_path}/run", f"trainer.steps={steps}", f"data.corpora=[{corpora}]")
        return (*(o for o in TINY if o != "data=text"), *SCHEDULE, *blend, *run)

    assert train(*overrides(2, (1, 1))).code == 0
    ended = train(*overrides(8, (1, 9)))
    assert ended.code == 2
    assert "run.allow_changes=[data.corpora]" in ended.text
    ended = train(*overrides(8, (1, 9)), "run.allow_changes=[data.corpora]")
    assert ended.code == 0, ended.text
    run = tmp_path / "run"
    (was, now) = events(run, "blend")[-1]["segments"]
    assert was == {"first_sample": 0, "weights": {"a": 0.5, "b": 0.5}}
    assert now == {"first_sample": 8, "weights": {"a": 0.1, "b": 0.9}}
    # train.py again, so that the weights come from the checkpoint's history alone
    assert train(*overrides(10, (1, 9))).code == 0
    assert events(run, "blend")[-1]["segments"] == [was, now]
    config = read_config(run)
    view = View(config, open_data(config.data), run, train=True)
    shown = [str(next(view.lines(index))) for index in range(4 * 10)]
    own = {name: [line for line in shown if line.startswith(f"{name}:")] for name in "ab"}
    assert len(set(shown)) == 40, "a window was read twice"
    assert len(own["a"]) == pytest.approx(4 + 0.1 * 32, abs=1.5)
    windows = make_windows(config, open_data(config.data), train=True)
    assert isinstance(windows, BlendedSamples)
    windows.resume(blend_of(run), 40)
    for step, first, found in read(run):
        rows = [causal_batch([windows[index]], [index]) for index in range(first, first + 4)]
        assert f"{digest(rows):x}" == found, step


@pytest.mark.exhaustive
def test_packed_separate_documents_go_on_in_another_layout(
    tiny: tuple[str, ...], tmp_path: Path
) -> None:
    """With other threads too; the samples are those of one loader."""
    records = (json.dumps({"text": part}) for part in paragraphs(40))
    (tmp_path / "text.jsonl").write_text("\n".join(records))
    run = tmp_path / "run"
    overrides = (
        *tiny, f"run.dir={run}", f"data.path={tmp_path}/text.jsonl",
        f"data.directory={tmp_path}/prepared", "data.packing=best_fit", "data.documents=separate",
    )  # fmt: skip
    ended = train(*overrides, "trainer.steps=3", "data.workers=3", "data.prefetch=2")
    assert ended.code == 0, ended.text
    assert "samples per epoch of whole documents" in ended.text
    layout = ("parallel.pipeline=2", "data.micro_batch=2")
    ended = train(*overrides, "trainer.steps=6", *layout)
    assert ended.code == 0, ended.text
    config = read_config(run)
    corpora = open_data(config.data)
    windows = make_windows(config, corpora, train=True)
    make_batch = make_batch_maker(config, corpora)
    for step, first, found in read(run):
        samples = range(first, first + 4)
        batch = make_batch([windows[index] for index in samples], samples)
        assert f"{digest([batch]):x}" == found, step
    assert [(step, first) for step, first, _ in read(run)] == [(n, 4 * n - 4) for n in range(1, 7)]
    view = View(config, corpora, run, train=True)
    shown = [str(line) for index in range(96) for line in view.lines(index)]
    assert sum(line.startswith("text: tokens") for line in shown) > 96, "several documents"
    ended = train(*overrides, "trainer.steps=8", "data.packing=stream")
    assert "run.allow_changes=[data.packing]" in ended.text


def test_nothing_to_go_on_from(tiny: tuple[str, ...], copied: Path, tmp_path: Path) -> None:
    ended = train(*tiny, f"run.dir={tmp_path}/new", "run.resume=required")
    assert (ended.code, "a checkpoint to resume from" in ended.text) == (2, True)
    ended = train(*tiny, f"run.dir={copied}", "run.resume=never")
    assert (ended.code, "already holds a run" in ended.text) == (2, True)
    shutil.rmtree(copied / "checkpoints")
    ended = train(*tiny, f"run.dir={copied}")
    assert (ended.code, "has trained and saved nothing" in ended.text) == (2, True)


def test_a_requeued_job_that_saved_nothing_begins_again(copied: Path, caplog) -> None:
    shutil.rmtree(copied / "checkpoints")
    wrote = {name: (copied / name).read_bytes() for name in ("metrics.jsonl", "ledger.jsonl")}
    assert not run_directory.lock_run_dir(copied, "auto", has_checkpoint=False, started_again=True)
    for name, content in wrote.items():
        assert not (copied / name).exists()
        assert (copied / f"{name}.0.void").read_bytes() == content
    assert "starts again" in caplog.text


def test_two_runs_in_one_directory(tiny: tuple[str, ...], tmp_path: Path) -> None:
    overrides = (*tiny, f"run.dir={tmp_path}/run", "trainer.steps=100000")
    first = Training(*overrides)
    try:
        wait_for(tmp_path / "run" / "metrics.jsonl")
        os.killpg(first.pid, signal.SIGSTOP)  # its lock stays, and it takes no time
        ended = train(*overrides)
        assert ended.code == 2
        assert "another run is writing to this one" in ended.text
    finally:
        first.kill()
        first.wait()


def test_a_run_waits_for_the_processes_of_a_killed_one(copied: Path) -> None:
    with (copied / run_directory.LOCK).open("w") as killed:
        fcntl.flock(killed, fcntl.LOCK_EX)
        threading.Timer(0.3, fcntl.flock, (killed, fcntl.LOCK_UN)).start()
        assert run_directory.lock_run_dir(copied, "auto", has_checkpoint=True)
        with pytest.raises(BlockingIOError):
            fcntl.flock(killed, fcntl.LOCK_EX | fcntl.LOCK_NB)


def flip_a_byte(folder: Path) -> None:
    file = max(folder.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def cut_a_file(folder: Path) -> None:
    file = max(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage", covering([flip_a_byte, cut_a_file], [cut_a_file]))
def test_damage_is_named_and_passed_over_when_allowed(
    damage: Any, tiny: tuple[str, ...], copied: Path
) -> None:
    damage(copied / "checkpoints" / "step_00000004")
    going_on = (*tiny, f"run.dir={copied}", "trainer.steps=5", "checkpoint.every_steps=2")
    ended = train(*going_on)
    assert ended.code == 1
    assert "step_00000004" in ended.text
    assert "is damaged" in ended.text
    assert "checkpoint.fallback=true" in ended.text
    assert "Traceback" not in ended.text
    ended = train(*going_on, "checkpoint.fallback=true")
    assert ended.code == 0, ended.text
    assert events(copied, "resume")[0]["step"] == 2
    assert [m[0] for m in learned(copied)] == [1, 2, 3, 4, 5]
    assert (copied / "checkpoints" / "step_00000004.void").is_dir() or (
        damage is cut_a_file and find(copied).step == 5
    )


def test_damage_of_all_does_not_begin_anew(tiny: tuple[str, ...], copied: Path) -> None:
    for checkpoint in (copied / "checkpoints").iterdir():
        flip_a_byte(checkpoint)
    ended = train(*tiny, f"run.dir={copied}", "trainer.steps=5", "checkpoint.fallback=true")
    assert ended.code == 1
    assert "no checkpoint can be resumed from; the newest: " in ended.text
    assert "step_00000004" in ended.text
    assert re.search(r"step_00000002\S* is damaged: .*; none is older", ended.text)
    assert "  do: put a copy there that can be read, or start a new run: " in ended.text
    assert "Traceback" not in ended.text
    assert learned(copied)[-1][0] == 4
    shutil.rmtree(copied / "checkpoints" / "step_00000002")
    ended = train(*tiny, f"run.dir={copied}", "trainer.steps=5")
    assert ended.code == 1
    assert "  do: put a copy there that can be read, or start a new run: " in ended.text
    assert "checkpoint.fallback=true" not in ended.text, "there is none before it"


def test_one_rank_asks_the_shared_file_system(
    tiny: tuple[str, ...], copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a file a rank, opening by every rank grows with the square of their number."""
    opened = Checkpoint.open

    def told(folder: Path) -> Checkpoint:
        with (tmp_path / "opened").open("a") as file:
            file.write(f"{dist.get_rank()} {folder.name}\n")
        return opened(folder)

    monkeypatch.setattr(Checkpoint, "open", told)
    ended = train(*tiny, f"run.dir={copied}", "trainer.steps=5", "checkpoint.mode=off")
    assert ended.code == 0, ended.text
    assert (tmp_path / "opened").read_text() == "0 step_00000004\n"


@pytest.mark.parametrize(("on_error", "code"), [("stop", 1), ("continue", 0)])
def test_a_checkpoint_that_cannot_be_written(
    on_error: str, code: int, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    ended = train(
        *tiny, f"run.dir={tmp_path}/run", "trainer.steps=4", "checkpoint.every_steps=1",
        f"checkpoint.on_error={on_error}",
    )  # fmt: skip
    assert ended.code == code, ended.text
    assert "the checkpoint of step 1 was not written" in ended.text
    assert "Traceback" not in ended.text
    steps = len(lines(tmp_path / "run"))
    assert steps == 4 if on_error == "continue" else steps <= 2, "known at the next step"
    assert ("The run continues (checkpoint.on_error=continue)" in ended.text) == (code == 0)


@pytest.mark.exhaustive
def test_a_late_failure_does_not_cost_the_next_checkpoint(
    tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before the last fails when the last step is done; there is no step after it."""
    commit = save._commit

    def slow_then_full(task: save.Task, ballot: Any) -> None:
        if task.step == 3:
            time.sleep(1)
            error = CheckpointError("the disk is full")
            ballot.conclude(str(error))
            raise error
        commit(task, ballot)

    monkeypatch.setattr(save, "_commit", slow_then_full)
    ended = train(
        *tiny, f"run.dir={tmp_path}/run", "trainer.steps=4", "checkpoint.every_steps=1",
        "checkpoint.on_error=continue",
    )  # fmt: skip
    assert ended.code == 0, ended.text
    assert "the checkpoint of step 3 was not written: the disk is full" in ended.text
    assert find(tmp_path / "run").step == 4


def test_the_watchdog_is_told_what_is_no_step(
    tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phase = Watchdog.phase

    def told(self: Watchdog, name: str, step: int | None = None) -> Any:
        with (tmp_path / "phases").open("a") as file:
            file.write(f"{name}\n")
        return phase(self, name, step)

    monkeypatch.setattr(Watchdog, "phase", told)
    ended = train(
        *tiny, f"run.dir={tmp_path}/run", "trainer.steps=2", "checkpoint.every_steps=1",
        "trainer.evaluate_every_steps=1",
    )  # fmt: skip
    assert ended.code == 0, ended.text
    seen = set((tmp_path / "phases").read_text().split())
    assert seen == {"groups", "step", "evaluation", "checkpoint", "closing"}


def test_a_line_torn_by_a_kill_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text('{"event": "blend", "segments": [{"first_sample": 0}')
    segments = [{"first_sample": 0, "weights": {"a": 1.0}}]
    LedgerFile(tmp_path).event("blend", 3, segments=segments)
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 2
    assert blend_of(tmp_path) == segments


def test_a_spike_sends_the_run_back_and_on_behind_its_samples(
    tiny: tuple[str, ...], copied: Path
) -> None:
    """Every rise of the loss counts as a spike here; one rewind is allowed."""
    ended = train(
        *tiny, f"run.dir={copied}", "trainer.steps=60", "run.allow_changes=[optimizer]",
        "optimizer.decay_steps=60", "checkpoint.every_steps=2", "trainer.spike_factor=1.0001",
        "trainer.spike_window=1", "trainer.rewinds_allowed=1",
    )  # fmt: skip
    assert ended.code == 1, ended.text
    assert "after 1 rewinds" in ended.text
    (rewind,) = events(copied, "rewind")
    back, spike = rewind["step"], rewind["spike"]
    assert 0 < spike - back <= 2
    assert rewind["next_sample"] == 4 * spike
    made_again = [e for e in lines(copied, "ledger.jsonl") if e.get("step") == back + 1]
    assert [e["first_sample"] for e in made_again if "digest" in e] == [4 * back, 4 * spike]
    assert [m[0] for m in learned(copied)] == list(range(1, len(learned(copied)) + 1))


def two_nodes(tiny: tuple[str, ...], run: Path, local: Path) -> tuple[str, ...]:
    """Two nodes of two ranks, each node with a checkpoint of every step on a disk of its own."""
    return (
        *tiny, f"run.dir={run}", "launch.ranks=4", "launch.ranks_per_node=2",
        "checkpoint.every_steps=4", f"checkpoint.tiers.local.path={local}",
        "checkpoint.tiers.local.every_steps=1", "checkpoint.tiers.local.keep=2", "sharding=zero1",
    )  # fmt: skip


@pytest.mark.exhaustive
def test_the_nearest_tier_that_all_nodes_have_is_used(
    tiny: tuple[str, ...], tmp_path: Path
) -> None:
    run, local = tmp_path / "run", tmp_path / "local"
    overrides = two_nodes(tiny, run, local)
    assert train(*overrides, "trainer.steps=7").code == 0
    shutil.rmtree(run / "checkpoints" / "step_00000007")  # as if killed after step 6
    (nodes,) = local.iterdir()
    # a step that is still being copied when step 6 is saved stays, too
    held = {
        node.name: sorted(step.name for step in node.iterdir())[-2:] for node in nodes.iterdir()
    }
    assert held == {f"node_0000{n}": ["step_00000005", "step_00000006"] for n in (0, 1)}
    ended = train(*overrides, f"trainer.steps={STEPS}")
    assert ended.code == 0, ended.text
    assert events(run, "resume")[-1]["step"] == 6
    # a node is lost: what the others still have of later steps does not help, but step 6 was copied
    # to the run directory when the run had resumed from it
    shutil.rmtree(run / "checkpoints" / "step_00000008")
    shutil.rmtree(nodes / "node_00001")
    ended = train(*overrides, f"trainer.steps={STEPS}")
    assert ended.code == 0, ended.text
    assert events(run, "resume")[-1]["step"] == 6


@pytest.mark.exhaustive
def test_what_a_rewind_left_out_stays_out(tiny: tuple[str, ...], tmp_path: Path) -> None:
    run, local = tmp_path / "run", tmp_path / "local"
    overrides = (
        *tiny, f"run.dir={run}", "trainer.steps=60", "checkpoint.every_steps=100",
        f"checkpoint.tiers.local.path={local}", "checkpoint.tiers.local.every_steps=1",
        "checkpoint.tiers.local.keep=60", "trainer.spike_window=1", "trainer.rewinds_allowed=1",
    )  # fmt: skip
    assert train(*overrides, "trainer.spike_factor=1.0001").code == 1  # at the second spike
    (rewind,) = events(run, "rewind")
    back = rewind["step"]
    for folder in (*run.glob("checkpoints/step_*"), *local.glob("*/*/step_*")):
        if folder.suffix or int(folder.name.removeprefix("step_")) > back:
            shutil.rmtree(folder)  # as if killed on the way again
    both = [run / "checkpoints", *local.glob("*/node_00000")]
    assert all((folder / f"step_{back:08d}").exists() for folder in both)
    assert train(*overrides, "trainer.spike_factor=1e9", f"trainer.steps={back + 1}").code == 0
    assert events(run, "resume")[-1]["step"] == back
    assert lines(run, "ledger.jsonl")[-1]["first_sample"] == rewind["next_sample"]


@pytest.mark.exhaustive
def test_nodes_do_not_go_on_from_the_same_step_of_different_starts(
    tiny: tuple[str, ...], tmp_path: Path
) -> None:
    run, local = tmp_path / "run", tmp_path / "local"
    overrides = two_nodes(tiny, run, local)
    assert train(*overrides, "trainer.steps=7").code == 0
    (nodes,) = local.iterdir()
    first, second = (nodes / f"node_0000{n}" / "step_00000006" for n in (0, 1))
    second.rename(tmp_path / "of_the_first_start")
    shutil.rmtree(first)
    for _ in range(2):
        shutil.rmtree(run / "checkpoints" / "step_00000007")  # as if killed after step 6
        assert train(*overrides, "trainer.steps=7").code == 0
        assert events(run, "resume")[-1]["step"] == 5
        # the node that was away is back, with step 6 as it was before
        shutil.rmtree(second)
        shutil.copytree(tmp_path / "of_the_first_start", second)


@pytest.mark.exhaustive
def test_one_node_s_own_tier_is_used_where_ranks_hold_the_same(
    tiny: tuple[str, ...], tmp_path: Path
) -> None:
    """Norms lie on both tensor ranks, and both write them."""
    run = tmp_path / "run"
    overrides = (
        *tiny, f"run.dir={run}", "parallel.tensor=2", "parallel.pipeline=1",
        "checkpoint.every_steps=4", f"checkpoint.tiers.local.path={tmp_path}/local",
        "checkpoint.tiers.local.every_steps=1", "checkpoint.tiers.local.keep=2",
    )  # fmt: skip
    assert train(*overrides, "trainer.steps=7").code == 0
    shutil.rmtree(run / "checkpoints" / "step_00000007")
    ended = train(*overrides, f"trainer.steps={STEPS}")
    assert ended.code == 0, ended.text
    assert events(run, "resume")[-1]["step"] == 6


def test_a_new_run_begins_with_the_weights_of_another(
    tiny: tuple[str, ...], half: Path, tmp_path: Path
) -> None:
    ended = train(*tiny, f"run.dir={tmp_path}/on", f"run.init_from={half}", "trainer.steps=1")
    assert ended.code == 0, ended.text
    trained = json.loads((half / "summary.json").read_text())["validation_loss"]
    begun = json.loads((tmp_path / "on" / "summary.json").read_text())["initial_validation_loss"]
    assert begun == pytest.approx(trained, rel=1e-5)
    ended = train(
        *tiny, f"run.dir={tmp_path}/off", f"run.init_from={half}", "model.hidden=64",
        "run.resume=auto",
    )  # fmt: skip
    assert ended.code == 2
    assert "set model.hidden=" in ended.text
