"""The study of mT5: every configuration has a predicted time, or a reason for its rejection."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import mt5_study as study
from frontier_llm.telemetry.jsonl import JsonlSink
from tests.telemetry.runs import step_metrics


@pytest.mark.parametrize("nodes", [4, 16])
def test_stage_two_of_the_13b_takes_less_than_stage_three(nodes):
    """The study's finding at every number of nodes (arXiv:2310.05350)."""
    seconds = {stage: study.plan("xxl", stage, nodes)["seconds"] for stage in study.STAGES}
    assert seconds[1] <= seconds[2] < seconds[3]


def test_a_rejected_configuration_has_a_reason():
    cell = study.plan("base", 1, 3)
    assert cell["seconds"] is None
    assert cell["reason"].startswith("data.global_batch: 1024 on 24 data-parallel replicas")


def test_the_table_and_the_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "MODELS", ("base",))
    figures = tmp_path / "study.json"
    assert study.main(["--nodes", "1,3", "--json", str(figures)]) == 0
    cells = json.loads(figures.read_text())["cells"]
    assert [(cell["model"], cell["stage"], cell["size"]) for cell in cells] == [
        ("mt5_base", stage, nodes) for stage in (1, 2, 3) for nodes in (1, 3)
    ]
    printed = capsys.readouterr().out
    assert "rejected" in printed
    assert "mt5_base ZeRO-3 on 3 nodes: data.global_batch" in printed


def test_each_run_has_its_own_folder(tmp_path, monkeypatch):
    folders = []

    def train(command, **_):
        (where,) = (word.partition("=")[2] for word in command if word.startswith("run.dir="))
        folders.append(Path(where))
        sink = JsonlSink(Path(where))
        for step in range(1, 7):
            sink.write(step_metrics(step, step_seconds=9.0 if step <= 3 else float(step)))
        sink.close()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", train)
    cells = [study.measure(1, 2, 3, tmp_path / "study") for _ in range(2)]
    assert [cell["seconds"] for cell in cells] == [5.0, 5.0]
    assert len(set(folders)) == 2
    assert all(folder.parent == tmp_path / "study" for folder in folders)


@pytest.mark.parametrize(
    "options", [["--nodes", "abc"], ["--nodes", "0"], ["--ranks", "1,"], ["--run", "--steps", "0"]]
)
def test_invalid_options_are_rejected(options, capsys):
    with pytest.raises(SystemExit):
        study.main(options)
    assert "wants" in capsys.readouterr().err
