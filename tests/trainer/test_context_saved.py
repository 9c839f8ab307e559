"""Checkpoints, texts and evaluations of runs are those of runs whose samples are not cut."""

import json
from functools import partial
from pathlib import Path

import pytest

from frontier_lab.stored_weights import read_tensor
from frontier_llm.checkpoint.discovery import Checkpoint, find
from frontier_llm.cli.main import main
from tests.covering import covering
from tests.forked_train import TINY, run, train
from tests.texts import paragraphs
from tests.trainer.test_resume import learned, lines, read

pytestmark = pytest.mark.slow

STEPS = 3
SHARDINGS = {
    "zero1": ("sharding=zero1",),
    "zero3": ("sharding=zero3",),
    "mixed": ("sharding.params=1", "sharding.grads=2", "sharding.optimizer=4"),
    "pipeline": ("sharding=zero1", "parallel.pipeline=2"),
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Whole documents fill the samples, and an update depends on the size of the gradient."""
    folder = tmp_path_factory.mktemp("corpus")
    records = (json.dumps({"text": part}) for part in paragraphs(15))
    (folder / "text.jsonl").write_text("\n".join(records))
    return (
        *TINY, f"data.path={folder}/text.jsonl", f"data.directory={folder}/prepared",
        "data.packing=best_fit", "data.documents=separate", "data.loss_mean=tokens",
        "launch.ranks=4", "parallel.pipeline=1", "optimizer.warmup_steps=0",
        "optimizer.epsilon=1e-3", f"optimizer.decay_steps={STEPS}",
    )  # fmt: skip


@pytest.mark.parametrize("sharding", covering(SHARDINGS, ("zero1", "zero3", "pipeline")))
def test_checkpoints_of_both_are_one_checkpoint(
    sharding: str, packed: tuple[str, ...], tmp_path: Path
) -> None:
    """The same ranges in the same files after a step; the cut run then goes on without a cut."""
    alone, cut = tmp_path / "1", tmp_path / "2"
    for folder, steps, context in ((alone, STEPS, 1), (cut, 1, 2), (cut, STEPS, 1)):
        ended = train(
            *packed, *SHARDINGS[sharding], f"run.dir={folder}", f"trainer.steps={steps}",
            f"parallel.context={context}", "checkpoint.every_steps=1", "checkpoint.keep=99",
        )  # fmt: skip
        assert ended.code == 0, ended.text
    one, other = (find(folder / "checkpoints" / "step_00000001") for folder in (alone, cut))
    assert other.manifest.tensors == one.manifest.tensors, "partition, files and offsets"
    sizes = [{name: file.size for name, file in c.manifest.files.items()} for c in (one, other)]
    assert sizes[0] == sizes[1]
    assert compared(one, other) < 1e-5
    assert read(cut) == read(alone)
    for mine, wanted in zip(learned(cut), learned(alone), strict=True):
        assert mine == pytest.approx(wanted, rel=1e-5)


def compared(one: Checkpoint, other: Checkpoint) -> float:
    """Return the largest difference of a state of a tensor, relative to its norm."""
    worst = 0.0
    for name in one.manifest.tensors:
        found = read_tensor(other, name)
        for state, wanted in read_tensor(one, name).items():
            worst = max(worst, ((found[state] - wanted).norm() / wanted.norm()).item())
    return worst


@pytest.fixture(scope="module")
def runs(packed: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs with one and two context ranks, whose validation reads the whole split."""
    folders = [tmp_path_factory.mktemp("runs") / str(context) for context in (1, 2)]
    for context, folder in enumerate(folders, 1):
        ended = train(
            *packed, f"run.dir={folder}", f"trainer.steps={STEPS}", f"parallel.context={context}",
            f"trainer.evaluate_every_steps={STEPS}", "trainer.evaluate_batches=9999",
            "trainer.sample_tokens=6", "sharding=zero1",
        )  # fmt: skip
        assert ended.code == 0, ended.text
    return folders


def test_whole_documents_in_cut_samples_have_the_same_losses(runs: list[Path]) -> None:
    whole, cut = map(lines, runs)
    assert read(runs[1]) == read(runs[0])
    assert [m["loss"] for m in cut] == pytest.approx([m["loss"] for m in whole], rel=2e-6)
    assert cut[0]["grad_norm"] == pytest.approx(whole[0]["grad_norm"], rel=1e-6)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in runs]
    assert summaries[1]["samples"] == summaries[0]["samples"] != []
    bits = [run["validation_bits_per_byte"] for run in summaries]
    assert bits[1] == pytest.approx(bits[0], rel=1e-6)


def test_commands_say_the_same_of_a_run_with_cut_samples(runs: list[Path], tmp_path: Path) -> None:
    """One process evaluates the whole split as the ranks did, and continues a text likewise."""
    validation = lines(runs[1])[-1]["validation_loss"]
    losses, texts = [], []
    for folder in runs:
        file = tmp_path / f"{folder.name}.json"
        ended = run(partial(main, ["evaluate", str(folder), "--json", str(file)]))
        assert ended.code == 0, ended.text
        losses.append(json.loads(file.read_text())[0]["loss"])
        words = ["generate", str(folder), "def ", "--tokens=8", "--temperature=0"]
        ended = run(partial(main, words))
        assert ended.code == 0, ended.text
        texts.append(ended.text)
    assert losses == pytest.approx([validation] * 2, rel=1e-6)
    assert texts[0] == texts[1]
