"""A run goes on with other corpora: no sample is left out or read again without a line."""

import os
import signal
from pathlib import Path

import pytest

from frontier_lab.commands.inspect_data import View
from frontier_lab.single_process_model import read_config
from frontier_llm.data.corpora import open_data
from frontier_llm.data.sentencepiece_tokenizer import train_tokenizer
from frontier_llm.telemetry.summary import RunSummary
from tests.forked_train import TINY, Ended, Training, train
from tests.texts import prose

pytestmark = pytest.mark.slow

OTHERS = tuple(word for word in TINY if word not in ("data=text", "data.vocabulary=300"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for number, name in enumerate(("first", "second")):
        (tmp_path / f"{name}.txt").write_text(prose(20, 20 * number))
    train_tokenizer([(tmp_path / "first.txt").read_text()], 300, tmp_path / "tokenizer.model")
    return tmp_path


def words_of(place: Path, steps: int, *data: str) -> tuple[str, ...]:
    return (
        *OTHERS, "optimizer.schedule=constant", f"run.dir={place}/run",
        f"data.directory={place}/prepared", f"data.tokenizer={place}/tokenizer.model",
        f"trainer.steps={steps}", *data,
    )  # fmt: skip


def begin(place: Path, steps: int, *data: str) -> Ended:
    """Start or resume the run in a folder that has texts and a tokenizer."""
    return train(*words_of(place, steps, *data))


def text(place: Path, name: str) -> tuple[str, str]:
    return "data=text", f"data.path={place}/{name}.txt"


def summary_of(place: Path) -> RunSummary:
    summary = RunSummary.read(place / "run")
    assert summary is not None
    return summary


def blend(place: Path, **names: str) -> tuple[str, str]:
    corpora = [f"{{name: {k}, path: {place}/{v}.txt, weight: 1}}" for k, v in names.items()]
    return "data=blend", f"data.corpora=[{', '.join(corpora)}]"


def test_a_text_goes_on_in_a_blend_and_a_blend_stays_one(place: Path) -> None:
    """The text is found by its content, whatever its name in the blend is."""
    allowed = "run.allow_changes=[data]"
    assert begin(place, 2, *text(place, "first")).code == 0
    ended = begin(place, 4, *blend(place, new="second"), allowed)
    assert ended.code == 2, ended.text
    assert "also the corpora that the run has read: text" in ended.text
    ended = begin(place, 4, *blend(place, new="second", old="first"), allowed)
    assert ended.code == 0, ended.text
    assert "the run reads on at sample 0 of new, 8 of old" in " ".join(ended.text.split())
    config = read_config(place / "run")
    view = View(config, open_data(config.data), place / "run", train=True)
    shown = [str(next(view.lines(index))) for index in range(16)]
    assert len(set(shown)) == 16, "a window was read twice"
    ended = begin(place, 6, *text(place, "first"), allowed)
    assert ended.code == 2, ended.text
    assert "only a blend knows how many samples" in ended.text
    assert "set data=blend" in ended.text


def test_another_text_or_order_is_said(place: Path) -> None:
    assert begin(place, 1, *text(place, "first")).code == 0
    ended = begin(place, 2, *text(place, "second"), "run.allow_changes=[data.path]")
    assert ended.code == 0, ended.text
    assert "the run reads on at sample 4 of text" in " ".join(ended.text.split())
    ended = begin(place, 3, *text(place, "second"))
    assert ended.code == 0, ended.text
    assert "the run reads on" not in ended.text
    seed = "trainer.seed=5", "run.allow_changes=[trainer.seed]"
    ended = begin(place, 3, *text(place, "second"), *seed)
    assert "the run reads on at sample 12 of text" in " ".join(ended.text.split())


def test_losses_of_another_text_before_are_not_those_of_the_run(place: Path) -> None:
    """The run stops before it evaluates on the new text; the next start evaluates."""
    assert begin(place, 1, *text(place, "first")).code == 0
    of_first = summary_of(place)
    words = words_of(place, 100_000, *text(place, "second"), "run.allow_changes=[data.path]")
    training = Training(*words)
    metrics = place / "run" / "metrics.jsonl"
    training.wait_until(lambda: len(metrics.read_text().splitlines()) > 1, "its second step")
    os.kill(training.pid, signal.SIGTERM)
    ended, of_second = training.wait(), summary_of(place)
    assert ended.code == 3, ended.text
    assert of_second.validation_loss is of_second.validation_bits_per_byte is None
    assert (of_first.validation_since, of_second.validation_since) == (0, 1)
    assert of_second.initial_validation_loss != of_first.initial_validation_loss
    assert f"{of_first.validation_loss:.3f}" not in (place / "run" / "report.html").read_text()
    steps = len(metrics.read_text().splitlines()) + 1
    assert begin(place, steps, *text(place, "second")).code == 0
    last = summary_of(place)
    assert (last.validation_step, last.validation_since) == (steps, 1)
    assert last.initial_validation_loss == of_second.initial_validation_loss
