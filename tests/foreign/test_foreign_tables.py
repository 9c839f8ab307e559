"""A row of a published table, written as a file of its program, has the same prediction."""

import csv
import json

import pytest

from benchmarks.planner_accuracy import ERRORS, FOLDER, engine_errors
from frontier_lab.commands import plan
from frontier_lab.commands.plan_foreign import foreign_row
from frontier_lab.commands.plan_measured import candidate_of, read_table
from frontier_lab.foreign.files import read_run
from frontier_lab.planning.measured import predict
from frontier_llm.planner.estimate import estimate
from frontier_llm.units import format_figure
from tests.foreign.files_of_runs import deepspeed_files, megatron_script, torchtitan_job


def _seconds(path, **given):
    given = {key.replace("__", "."): str(value) for key, value in given.items()}
    return estimate(candidate_of(foreign_row(read_run(path, None, given), given))).time.seconds


def _rows(name):
    """Return the runs of a table and their cells."""
    path = FOLDER / f"{name}.csv"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return list(zip(read_table(path), csv.DictReader(lines), strict=True))


@pytest.mark.parametrize(
    ("table", "every", "version"),
    [
        ("megatron_2022", 1, {"full": ["--DDP-impl local", "--recompute-granularity full"],
                              "selective": ["--DDP-impl local", "--recompute-activations"]}),
        ("megatron_sc21_unused", 1, {"full": ["--checkpoint-activations"]}),
        pytest.param(
            "vtrain_single_node", 29, {"none": ["--DDP-impl local"]}, marks=pytest.mark.exhaustive
        ),
    ],
)  # fmt: skip
def test_megatron_scripts_have_the_predictions_of_their_table(tmp_path, table, every, version):
    path = tmp_path / "run.sh"
    for run, _ in _rows(table)[::every]:
        for candidate in run.candidates:
            config = candidate.config
            if config.model.layers % (config.parallel.pipeline * config.parallel.chunks):
                continue  # Megatron-LM has equal model chunks only
            path.write_text(megatron_script(candidate, *version[config.recompute]))
            expected = estimate(candidate).time.seconds
            assert _seconds(path, cluster=config.cluster.name) == expected, run.label


def test_scripts_of_megatron_deepspeed_have_the_predictions_of_blooms_table(tmp_path):
    path = tmp_path / "run.sh"
    for run, row in _rows("bloom_prequel"):
        (candidate,) = run.candidates
        script = megatron_script(candidate, "--deepspeed --zero-stage 1 --checkpoint-activations")
        path.write_text(script)
        given = {key: row[key] for key in row if key.startswith("planner.engine.")}
        given["cluster"] = row["cluster"]
        given["parallel.layers_per_stage"] = row["parallel.layers_per_stage"]
        assert _seconds(path, **given) == predict(run).estimate.time.seconds, run.label


@pytest.mark.parametrize("table", ["llm_foundry_h100_under_7b", "llm_foundry_a100_40gb"])
def test_torchtitan_files_have_the_predictions_of_fsdps_tables(tmp_path, table):
    path = tmp_path / "job.toml"
    for run, row in _rows(table)[::3]:
        (candidate,) = run.candidates
        path.write_text(torchtitan_job(candidate))
        given = {key: row[key] for key in row if key.partition(".")[0] in ("cluster", "model")}
        given |= {key: row[key] for key in row if key.startswith("planner.engine.")}
        assert _seconds(path, **given) == predict(run).estimate.time.seconds, run.label


@pytest.mark.parametrize("table", ["amsp", "amsp_zero3"])
def test_deepspeed_files_have_the_predictions_of_amsps_tables(tmp_path, table):
    rows = [(run, row) for run, row in _rows(table) if row["planner.engine"] == "deepspeed"]
    assert len(rows) > 3
    for run, row in rows:
        (candidate,) = run.candidates
        path = deepspeed_files(candidate, tmp_path)
        name = "planner.engine.message_elements"
        given = {name: row[name], "recompute": row["recompute"], "cluster": "a800_amsp"}
        given["data.sequence_length"] = "4096"
        assert _seconds(path, **given) == predict(run).estimate.time.seconds, run.label


def test_from_prints_and_writes_what_table_predicts(tmp_path, capsys):
    run, _ = _rows("megatron_2022")[1]
    path, out = tmp_path / "run.sh", tmp_path / "plan.json"
    switches = ["--DDP-impl local", "--recompute-activations"]
    path.write_text(megatron_script(run.candidates[0], *switches))
    limits = ["planner.tensor=[8]", "planner.micro_batch=[4]"]
    assert plan.main(["--from", str(path), "cluster=a100_80g", "--json", str(out), *limits]) == 0
    found = json.loads(out.read_text())
    predicted = predict(run)
    assert found["run"]["step_seconds"] == predicted.predicted
    assert found["read"]["keys"]["recompute"] == "selective"
    most = found["errors"]["most"]
    low, high = predicted.predicted / (1 + most), predicted.predicted / (1 - most)
    printed = capsys.readouterr().out
    step, (first, last) = (
        format_figure(predicted.predicted, 4),
        (format_figure(t, 3) for t in (low, high)),
    )
    assert f"step: {step} s ({first} to {last} s)" in printed
    assert "note: no published runs of this program were compared" in printed
    assert {*found["layouts"]} == {"Megatron-LM (megatron_2022)", "this program (ours)"}


@pytest.mark.exhaustive
def test_the_stored_errors_are_those_of_the_published_runs():
    assert json.loads(ERRORS.read_text()) == engine_errors()
