"""frontier-llm plan --table: predictions for measured runs, and mistakes in a table."""

import csv
import json

import pytest

from benchmarks.planner_accuracy import FOLDER
from frontier_lab.commands import plan
from frontier_lab.commands.plan_measured import read_table
from frontier_lab.planning.measured import QUANTITIES, changed_cluster, predict, with_constants
from frontier_llm.cli.experiments import composed
from frontier_llm.cli.options import run_command

COLUMNS = {
    "cluster": "a100_80g",
    "planner.engine": "fsdp",
    "model": "gpt_125m",
    "precision": "bf16",
    "ranks": "8",
    "data.global_batch": "64",
    "data.micro_batch": "4",
    "data.sequence_length": "512",
    "parallel.pipeline": "1",
    "sharding": "zero2",
    "measured_step_seconds": "0.1",
}


def _write(path, *changes, without=()):
    """Write a table with a row per change of COLUMNS."""
    rows = [{**COLUMNS, **change} for change in changes or ({},)]
    with path.open("w", newline="") as file:
        columns = [column for column in rows[0] if column not in without]
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def _run(capsys, *arguments):
    code = run_command(lambda: plan.main([str(a) for a in arguments]))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_tables_predictions_are_printed_and_written_next_to_it(tmp_path, capsys):
    table = _write(tmp_path / "runs.csv", {}, {"data.micro_batch": "8"})
    code, printed, _ = _run(capsys, "--table", table)
    assert code == 0
    assert "mean error" in printed
    rows = list(csv.DictReader((tmp_path / "runs.predicted.csv").open()))
    assert [row["row"] for row in rows] == ["1", "2"]
    for row in rows:
        assert float(row["error"]) == pytest.approx(float(row["predicted"]) / 0.1 - 1)
        parts = [float(row[key]) for key in row if key.endswith("_seconds")]
        assert sum(parts) == pytest.approx(2 * float(row["step_seconds"]))  # the sum and the parts


def test_json_is_written_where_out_says(tmp_path, capsys):
    table, out = _write(tmp_path / "runs.csv"), tmp_path / "x.json"
    assert _run(capsys, "--table", table, "--out", out)[0] == 0
    (row,) = json.loads(out.read_text())
    assert row["quantity"] == "measured_step_seconds"
    assert not (tmp_path / "runs.predicted.csv").exists()


def test_every_quantity_tells_the_same_step(tmp_path):
    """A run is measured in one quantity as its prediction in it; then the others agree."""
    (run,) = read_table(_write(tmp_path / "runs.csv"))
    seconds = predict(run).estimate.time.seconds
    tokens = 64 * 512 / seconds / 8
    assert QUANTITIES["measured_tokens_per_second"](predict(run).estimate) == pytest.approx(tokens)
    for quantity in QUANTITIES:
        table = _write(
            tmp_path / f"{quantity}.csv", {quantity: "3"},
            without={"measured_step_seconds"} - {quantity},
        )  # fmt: skip
        (other,) = read_table(table)
        assert predict(other).estimate.time.seconds == seconds


def test_of_alternatives_the_fastest_is_predicted(tmp_path):
    open_, *each = read_table(
        _write(tmp_path / "runs.csv", *({"data.micro_batch": m} for m in ("1|4|8", "1", "4", "8")))
    )
    seconds = [predict(run).predicted for run in each]
    assert len(open_.candidates) == 3
    assert predict(open_).predicted == min(seconds) < max(seconds)


def test_overrides_hold_for_all_rows_and_columns_have_precedence(tmp_path):
    table = _write(tmp_path / "runs.csv", without={"cluster"})
    (run,) = read_table(table, ["cluster=h100_8", "data.micro_batch=2"])
    config = run.candidates[0].config
    assert config.cluster.name == "h100_8"
    assert config.data.micro_batch == 4


def test_the_engine_of_a_row_decides(tmp_path):
    fsdp, deepspeed = read_table(_write(tmp_path / "t.csv", {}, {"planner.engine": "deepspeed"}))
    assert fsdp.candidates[0].config.planner.engine.overlaps
    assert predict(fsdp).predicted < predict(deepspeed).predicted


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.hiddens": "1"}, ["model.hiddens", "did you mean model.hidden"]),
        ({"gpus": "8"}, ["gpus", "did you mean ranks"]),
        ({"data.micro_batch": ""}, ["row 1, data.micro_batch", "empty cell", "null"]),
        ({"data.micro_batch": "x"}, ["row 1, data.micro_batch"]),
        ({"data.micro_batch": "3"}, ["row 1, data.global_batch"]),
        ({"data.micro_batch": "{"}, ["row 1, data.micro_batch"]),
        ({"cluster": "a100"}, ["row 1, cluster", "a100_80g"]),
        ({"planner.engine": "nemo"}, ["row 1, planner.engine", "megatron_core"]),
        ({"ranks": "many"}, ["row 1, ranks", "many"]),
        ({"ranks": "3", "sharding": "zero1"}, ["row 1", "do:"]),
        ({"measured_step_seconds": "-1"}, ["row 1, measured_step_seconds", "above 0"]),
        ({"measured_step_seconds": "nan"}, ["row 1, measured_step_seconds"]),
        ({"measured_tflops": "1"}, ["exactly one of"]),
        ({"cluster": "dgx2_v100"}, ["row 1, precision"]),
    ],
)
def test_a_mistake_is_one_message_with_its_row(tmp_path, capsys, change, words):
    code, _, message = _run(capsys, "--table", _write(tmp_path / "runs.csv", change))
    assert code == 2
    assert all(word in message for word in words), message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names the columns"),
        ("ranks,measured_step_seconds\n", "names the columns"),
        ("ranks,measured_step_seconds\n1\n", "row 1"),
        ("model,measured_step_seconds\ngpt_tiny,1\n", "no number of ranks"),
        ("ranks,model\n1,gpt_tiny\n", "no measured quantity"),
    ],
)
def test_an_incomplete_table_is_refused(tmp_path, capsys, text, words):
    (tmp_path / "t.csv").write_text(text)
    code, _, message = _run(capsys, "--table", tmp_path / "t.csv")
    assert (code, words in message) == (2, True), message
    assert _run(capsys, "--table", tmp_path / "absent.csv")[0] == 2


def test_a_fit_finds_the_constants_that_made_the_runs(tmp_path, capsys):
    """Runs are made with another speed of products; a fit finds it and gains on rows left out."""
    changes = [
        {"data.micro_batch": m, "data.sequence_length": s, "model": "gpt_3b"}
        for m in ("4", "8")
        for s in ("512", "2048")
    ]
    runs = read_table(_write(tmp_path / "runs.csv", *changes))
    made = [
        predict(run, lambda c: with_constants(c, {"product_share": 0.5})).predicted for run in runs
    ]
    table = _write(
        tmp_path / "made.csv",
        *({**c, "measured_step_seconds": str(m)} for c, m in zip(changes, made, strict=True)),
    )
    code, printed, _ = _run(capsys, "--table", table, "--fit")
    assert code == 0
    assert "write this into" in printed
    share = next(line for line in printed.splitlines() if "product_share" in line).split()
    assert float(share[-1]) == pytest.approx(0.5, abs=0.03)


def test_constants_are_replaced_and_others_stay():
    cluster = composed("cluster=a100_80g").cluster
    changed = changed_cluster(cluster, {"product_share": 0.5, "near": 0.3})
    assert changed.device.calibration.products["bf16"].tflops == 156
    assert [link.efficiency for link in changed.links] == [0.3, cluster.links[-1].efficiency]
    assert changed_cluster(cluster, {}) == cluster


def test_published_tables_name_their_source():
    for path in FOLDER.glob("*.csv"):
        comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
        assert any("Source:" in line for line in comments), path
