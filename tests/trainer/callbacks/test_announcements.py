"""What a run says at its start: a few lines on the console, the others in run.log."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from frontier_llm.cli.compose import compose
from frontier_llm.config import RunConfig, decode
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.trainer.callbacks.run_report import ON_THE_CONSOLE, _warnings
from tests.forked_train import TINY, train
from tests.texts import prose

LABEL = re.compile(r"(?m)^\d\d:\d\d:\d\d  ([a-z]+) +\S")


def test_the_console_has_the_main_lines_and_the_file_all(tmp_path: Path) -> None:
    run_dir, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text(prose(40))
    ended = train(
        *TINY, f"run.dir={run_dir}", f"data.path={text}", "trainer.steps=3",
        f"data.directory={tmp_path}/corpora", "model.vocabulary=700",
        "optimizer.learning_rate=3e-3", "sharding=zero3",
    )  # fmt: skip
    assert ended.code == 0, ended.text
    before = ended.text.partition("step 1/")[0]
    shown = [label for label in LABEL.findall(before) if label not in ("start", "corpus", "the")]
    assert shown == [label for label in ON_THE_CONSOLE if label != "recovery"]
    assert "the tokenizer has 300 tokens, the embedding 700 rows" in before
    assert "data 1; sharding=zero3, which divides nothing on one data rank; " in before
    assert re.search(r"; [0-9]+ micro-batch(es)? of [0-9]+ samples?\n", before)
    assert "optimizer.learning_rate" not in ended.text, "the model is small"
    log = (run_dir / "run.log").read_text()
    count = r"(all \d+ samples|\d+ of \d+ samples, by trainer.evaluate_batches)"
    for line in (rf": data .*; a validation reads {count};", rf": untrained .* on {count} \(ln",
                 rf": validation .* nats per token.*; read: {count}\n"):  # fmt: skip
        assert re.search(line, log), line
    for label in ("preflight", "kernels", "attention", "rates", "plan", *shown):
        assert f": {label:<10} " in log, label
    assert "2 ranks on 1 host passed" in log
    assert "not calibrated: frontier-llm calibrate" in log
    plan = [line for line in log.splitlines() if ": plan " in line]
    assert "(planned" not in plan[1], "the cluster file of this machine has estimates only"


def _context(config: RunConfig, tokens: int, *warnings: tuple[str, str]) -> Any:
    tokenizer = SimpleNamespace(vocabulary=tokens)
    corpus = SimpleNamespace(tokenizer=tokenizer, warnings=warnings)
    hardware = SimpleNamespace(accelerator=Accelerator(torch.device("cpu"), "cpu", "cpu"))
    return SimpleNamespace(config=config, data=SimpleNamespace(corpus=corpus), hardware=hardware)


def test_slow_products_of_fp16_on_a_cpu_are_said() -> None:
    config = decode(compose(["optimizer.warmup_steps=0", "precision=fp16"]))
    (warning,) = _warnings(_context(config, config.model.vocabulary))
    assert "precision=fp16 on a CPU" in warning


def test_a_text_in_single_bytes_is_said_with_its_corpus() -> None:
    config = decode(compose(["optimizer.warmup_steps=0"]))
    context = _context(config, config.model.vocabulary, ("book", "98% of the text"))
    assert list(_warnings(context)) == ["corpus book: 98% of the text"]


@pytest.mark.parametrize(
    ("overrides", "todo"),
    [
        (["data.vocabulary=4096"], "add text, or set model.vocabulary=637 data.vocabulary=637"),
        (["data.vocabulary=637"], "data.vocabulary to more tokens, or set model.vocabulary=637"),
        (
            ["data.tokenizer=a.model"],
            "use a tokenizer with more tokens (data.tokenizer), or set model.vocabulary=637",
        ),
        (
            ["model=mt5_tiny", "data=text_spans", "data.path=a", "data.vocabulary=3000"],
            "add text, or set model.vocabulary=737 data.vocabulary=637",
        ),
    ],
)
def test_unused_rows_are_said_with_what_helps(overrides: list[str], todo: str) -> None:
    config = decode(compose(["model.vocabulary=4096", *overrides]))
    (warning,) = _warnings(_context(config, 637))
    assert warning.endswith(todo)


def test_a_warm_up_that_does_not_end_is_said() -> None:
    config = decode(compose(["trainer.steps=5", "optimizer.warmup_steps=20"]))
    (warning,) = _warnings(_context(config, config.model.vocabulary))
    assert warning.endswith("set optimizer.warmup_steps to at most 5")
    assert f"{config.optimizer.learning_rate / 4:.3g}" in warning
