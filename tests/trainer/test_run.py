"""The program as a user starts it: one run in 3D, its directory, and what can be done with it."""

import gzip
import hashlib
import json
import os
import re
import shutil
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch.distributed as dist

from frontier_llm.cli.main import main
from frontier_llm.data.prepared_corpus import TokenStream
from tests import forked_train
from tests.covering import covering
from tests.texts import prose

pytestmark = pytest.mark.slow

SMALL = (
    "data=text",
    "data.vocabulary=300",
    "data.sequence_length=32",
    "data.global_batch=8",
    "data.micro_batch=1",
    "model.vocabulary=300",
    "model.hidden=32",
    "precision=fp32",
    "telemetry.progress=false",
    "trainer.evaluate_batches=1",
)
STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus: sentences of made-up words."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(prose(60))
    return folder


@pytest.fixture(scope="module")
def corpus(folder: Path) -> list[str]:
    return [f"data.path={folder}/text.txt", f"data.directory={folder}/corpora"]


@pytest.fixture(scope="module")
def run(folder: Path, corpus: list[str]) -> Path:
    """A finished run on 8 ranks as two nodes of four: everything is cut that can be."""
    ended = forked_train.train(
        *SMALL,
        *corpus,
        f"run.dir={folder}/run",
        f"trainer.steps={STEPS}",
        "trainer.evaluate_every_steps=3",
        "trainer.sample_tokens=4",
        "launch.ranks=8",
        "launch.ranks_per_node=4",
        "parallel.tensor=2",
        "parallel.pipeline=2",
        "parallel.chunks=2",
        "parallel.sequence=true",
        "sharding=zero3",
        "telemetry.tensorboard=true",
        "telemetry.trace_from_step=2",
        "telemetry.trace_steps=2",
        "optimizer.warmup_steps=0",
        draws=True,
    )
    assert ended.code == 0, ended.text
    assert "tensor 2 x pipeline 2 x data 2" in ended.text
    return folder / "run"


def test_metrics_have_every_field_of_the_contract_once_a_step(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert {
            "step", "loss", "grad_norm", "learning_rate", "tokens", "step_seconds",
            "tokens_per_second", "model_tflops_per_device", "mfu", "sent_bytes",
            "checkpoint_stall_seconds", "checkpoints_skipped", "archive_failures", "skipped",
        } <= line.keys()  # fmt: skip
        assert line["mfu"] is None
        assert line["tokens"] == line["step"] * 8 * 32
        sent = line["sent_bytes"]
        assert sent["tensor"]["node"] > 0
        assert sent["tensor"]["network"] == 0, "tensor ranks are neighbours"
        assert sent["pipeline"]["network"] > 0, "stages lie on different nodes here"
        assert sent["gather_params"]["node"] > 0
        assert sent["reduce_grads"]["node"] > 0
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[2]["validation_loss"] is not None
    assert lines[1]["validation_loss"] is None


def test_directory_is_complete(run: Path) -> None:
    config = (run / "config.yaml").read_bytes()
    assert hashlib.sha256(config).hexdigest() in (run / "config.yaml.sha256").read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["exit_code"] == 0
    assert len(summary["ranks"]) == 8
    for rank in summary["ranks"]:
        held, predicted = rank["memory_bytes"], rank["predicted_bytes"]
        assert 0 < held.pop("gathered") <= predicted.pop("gathered")
        assert held == predicted
    assert len(summary["samples"]) == 3
    assert summary["validation_loss"] < summary["initial_validation_loss"]
    report = (run / "report.html").read_text()
    assert report.count("<path") > 20
    assert "exactly the predicted number of bytes" in report
    assert "measured pipeline" in report
    assert not (run / "failures").exists() or not list((run / "failures").iterdir())
    assert list((run / "wandb").glob("offline-run-*/*.wandb"))


def test_the_measured_passes_fit_into_their_step(run: Path) -> None:
    timeline = json.loads((run / "timeline.json").read_text())
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (seconds,) = [row["step_seconds"] for row in metrics if row["step"] == timeline["step"]]
    assert 0 < timeline["measured"]["seconds"] < seconds
    assert 0 < timeline["measured"]["waiting_share"] < 1


def test_one_rank_of_each_stage_writes_a_trace(run: Path) -> None:
    files = sorted(file.name for file in (run / "traces").iterdir())
    assert files == [f"steps_2_to_3_rank_{rank}.json.gz" for rank in (0, 4)]
    for file in files:
        trace = json.loads(gzip.decompress((run / "traces" / file).read_bytes()))
        names = Counter(event.get("name") for event in trace["traceEvents"])
        assert names["step 2"] == names["step 3"] == 1
        assert names["aten::mm"] > 0
        assert names["gloo:recv"] > 0, sorted(name for name in names if name and "gloo" in name)


def test_generate_reads_the_checkpoint_of_eight_ranks_on_one(run: Path) -> None:
    ended = forked_train.run(lambda: main(["generate", str(run), "import", "--tokens", "5"]))
    assert ended.code == 0, ended.text
    assert ended.text.splitlines()[1].startswith("import")


def test_same_seed_is_the_same_run_in_another_layout(
    run: Path, folder: Path, corpus: list[str]
) -> None:
    """The order of samples and the initial weights know nothing of the layout."""
    ended = forked_train.train(
        *SMALL, *corpus, f"run.dir={folder}/alone", f"trainer.steps={STEPS}", "launch.ranks=1",
        "parallel.pipeline=1", "optimizer.warmup_steps=0", "telemetry.wandb=off",
        "trainer.sample_tokens=0",
    )  # fmt: skip
    assert ended.code == 0, ended.text
    losses = [
        [json.loads(line)["loss"] for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (run, folder / "alone")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.exhaustive
def test_stages_in_between_read_no_text(
    folder: Path, corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = TokenStream.read

    def told(stream: TokenStream, start: int, count: int) -> npt.NDArray[np.generic]:
        (tmp_path / f"rank_{dist.get_rank()}").touch()
        return read(stream, start, count)

    monkeypatch.setattr(TokenStream, "read", told)
    losses = []
    for pipeline in (1, 3):
        ended = forked_train.train(
            *SMALL, *corpus, f"run.dir={tmp_path}/{pipeline}", "trainer.steps=2", "model.layers=3",
            f"launch.ranks={pipeline}", f"parallel.pipeline={pipeline}", "checkpoint=off",
            "trainer.sample_tokens=0",
        )  # fmt: skip
        assert ended.code == 0, ended.text
        lines = (tmp_path / str(pipeline) / "metrics.jsonl").read_text().splitlines()
        losses += [[json.loads(line)["loss"] for line in lines]]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert {path.name for path in tmp_path.glob("rank_*")} == {"rank_0", "rank_2"}


def test_a_prepared_corpus_is_trained_on_without_its_text(
    folder: Path, corpus: list[str], tmp_path: Path
) -> None:
    text, given = shutil.copyfile(folder / "text.txt", tmp_path / "text.txt"), tmp_path / "given"
    losses = []
    for path in (text, given):
        data = ["data.vocabulary=300"] if path == text else []
        ended = forked_train.train(
            *(word for word in SMALL if not word.startswith("data.vocabulary")), *data,
            f"data.path={path}", f"data.directory={tmp_path}/c", f"run.dir={tmp_path}/{path.stem}_",
            "trainer.steps=2", "launch.ranks=1", "parallel.pipeline=1", "checkpoint=off",
        )  # fmt: skip
        assert ended.code == 0, ended.text
        assert "nothing left out; a validation reads" in ended.text
        lines = (tmp_path / f"{path.stem}_" / "metrics.jsonl").read_text().splitlines()
        losses += [[json.loads(line)["loss"] for line in lines]]
        if path == text:
            next((tmp_path / "c").glob("text-*")).rename(given)
            text.unlink()
    assert losses[0] == losses[1]
    assert f"corpus text in {given}: prepared" in ended.text


def test_sigterm_while_text_is_prepared_says_what_is_kept(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(prose(4_000))
    run = forked_train.Training(
        *SMALL, f"data.path={tmp_path}/text.txt", f"data.directory={tmp_path}/c",
        f"run.dir={tmp_path}/run", "launch.ranks=1", "parallel.pipeline=1",
    )  # fmt: skip
    run.wait_until(lambda: list(tmp_path.glob("c/.*.partial")), "unfinished work")
    os.kill(run.pid, signal.SIGTERM)
    ended = run.wait()
    assert ended.code == 128 + signal.SIGTERM, ended.text
    said = ended.text.splitlines()[-1]
    assert said.startswith("interrupted; the same command goes on with the parts of the corpus")
    assert not (tmp_path / "run").exists()
    assert list(tmp_path.glob("c/.*.partial"))


def test_loss_that_is_not_finite_ends_the_run_with_a_report(
    folder: Path, corpus: list[str]
) -> None:
    ended = forked_train.train(
        *SMALL, *corpus, f"run.dir={folder}/nan", "optimizer.learning_rate=1e30", "launch.ranks=2",
        "optimizer.warmup_steps=0", "trainer.bad_steps_allowed=1", "telemetry.wandb=off",
        "precision=fp32",
    )  # fmt: skip
    assert ended.code == 1
    assert "not finite for 2 steps in a row" in ended.text
    assert "or use precision" not in ended.text
    assert "Traceback" not in ended.text
    summary = json.loads((folder / "nan" / "summary.json").read_text())
    assert summary["exit_code"] == 1
    assert (folder / "nan" / "report.html").exists()


def test_a_model_without_a_loss_ends_the_run_and_other_commands(
    folder: Path, corpus: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = str(folder / "no_loss")
    ended = forked_train.train(
        *SMALL, *corpus, f"run.dir={run_dir}", "optimizer.learning_rate=1e30", "trainer.steps=3",
        "optimizer.warmup_steps=1", "launch.ranks=2", "telemetry.wandb=off",
    )  # fmt: skip
    assert ended.code == 1
    assert "the loss has not been finite since step 2: the model cannot be used" in ended.text
    summary = json.loads((folder / "no_loss" / "summary.json").read_text())
    assert "validation loss is nan" in summary["exit_reason"]
    said = ended.text
    (folder / "short.txt").write_text("a short text")
    options = ["--samples=2"], ["--text", f"{folder}/short.txt"]
    for command in (["generate", "a"], *(["evaluate", *words] for words in options)):
        assert main([command[0], run_dir, *command[1:]]) == 1
        refusal = capfd.readouterr().err
        assert f"{run_dir}/checkpoints/step_00000003: " in refusal
        assert "  do: " in refusal
        said += refusal
    assert "Traceback" not in said


@pytest.mark.parametrize("victim", covering(["parent", "group"], ["group"]))
def test_request_to_stop_ends_in_order(folder: Path, corpus: list[str], victim: str) -> None:
    run_dir = folder / f"stopped_{victim}"
    training = forked_train.Training(
        *SMALL, *corpus, f"run.dir={run_dir}", "trainer.steps=100000", "launch.ranks=2",
        "telemetry.wandb=off", "trainer.evaluate_every_steps=3",
    )  # fmt: skip
    wait_for_line(run_dir / "metrics.jsonl", 4)
    if victim == "parent":
        os.kill(training.pid, signal.SIGTERM)
    else:
        os.killpg(training.pid, signal.SIGINT)  # what Ctrl-C does
    ended = training.wait(60)
    assert ended.code == 3, ended.text
    assert f"to continue, repeat the command with run.dir={run_dir}" in ended.text
    steps = len((run_dir / "metrics.jsonl").read_text().splitlines())
    at = f" at step {steps // 3 * 3}" if steps % 3 else ""
    assert re.search(rf" -> [0-9.]+ nats per token{at}( =|;)", ended.text), (steps, ended.text)
    assert [max(path.name for path in (run_dir / "checkpoints").iterdir())] == [f"step_{steps:08d}"]
    with pytest.raises(ProcessLookupError):
        os.killpg(training.pid, 0)  # nobody is left


@pytest.mark.exhaustive
def test_a_run_goes_on_without_room_for_its_records(folder: Path, corpus: list[str]) -> None:
    run_dir = folder / "no_room"
    run_dir.mkdir()
    for name in ("metrics.jsonl", "ledger.jsonl", "report.html.partial"):
        (run_dir / name).symlink_to("/dev/full")
    (run_dir / "config.yaml.sha256").touch()  # files of a run that ended before its first step
    ended = forked_train.train(
        *SMALL, *corpus, f"run.dir={run_dir}", "trainer.steps=3", "telemetry.wandb=off"
    )
    assert ended.code == 0, ended.text
    for text in ("metrics.jsonl cannot be written: No space left", "metrics.jsonl lacks its last 3",
                 "ledger.jsonl cannot be written", "ledger.jsonl lacks its last 4",
                 "report.html cannot be written"):  # fmt: skip
        assert text in ended.text
    assert "Traceback" not in ended.text


def wait_for_line(path: Path, lines: int = 1) -> None:
    forked_train.Training.wait_until(
        lambda: path.exists() and len(path.read_text().splitlines()) >= lines, f"a line in {path}"
    )
