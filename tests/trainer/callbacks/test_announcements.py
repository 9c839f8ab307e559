"""What a run says at its start: a few lines on the console, the others in run.log."""

import re
from pathlib import Path

from frontier_llm.trainer.callbacks.announcements import ON_THE_CONSOLE
from tests.forked_train import TINY, train

LABEL = re.compile(r"(?m)^\d\d:\d\d:\d\d  ([a-z]+) +\S")


def test_the_console_has_the_lines_that_users_need_and_the_file_has_all(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ended = train(
        *TINY, f"run.dir={run_dir}", "data.path=frontier_llm/trainer", "trainer.steps=3",
        f"data.directory={tmp_path}/corpora", "model.vocabulary=700",
        "optimizer.learning_rate=3e-3",
    )  # fmt: skip
    assert ended.code == 0, ended.text
    before = ended.text.partition("step 1/")[0]
    shown = [label for label in LABEL.findall(before) if label not in ("start", "corpus", "the")]
    assert shown == [label for label in ON_THE_CONSOLE if label != "recovery"]
    assert "the tokenizer has 300 tokens, the embedding 700 rows" in before
    assert "optimizer.learning_rate" not in ended.text, "the model is small"
    log = (run_dir / "run.log").read_text()
    for label in ("preflight", "kernels", "attention", "rates", "plan", *shown):
        assert f": {label:<10} " in log, label
    assert "1 host passed" in log
    assert "not calibrated: frontier-llm calibrate" in log
    plan = [line for line in log.splitlines() if ": plan " in line]
    assert "(planned" not in plan[1], "the cluster file of this machine has estimates only"
