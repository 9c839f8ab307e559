"""tools/plan.py: what it prints, what it writes, what it refuses."""

import json

from frontier_llm.config import decode
from frontier_llm.planner.candidate import Candidate
from tools import plan, plan_file
from tools.compose import compose
from tools.plan_file import experiment_text

SMALL = (
    "experiment=frontier_22b",
    "planner.nodes=8",
    "planner.tensor=[1,2]",
    "planner.pipeline=[4,8]",
    "planner.chunks=[1]",
    "planner.rows=3",
)
KEYS = {
    "layout",
    "factors",
    "step_seconds",
    "tokens_per_second",
    "mfu",
    "hfu",
    "peak_memory_bytes",
    "bubble_fraction",
    "exposed_communication_seconds",
    "checkpoint_stall_seconds",
    "refused_reason",
}


def _run(capsys, *arguments):
    code = plan.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_the_best_layouts_are_printed_and_written(capsys, tmp_path):
    file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    code, out, _ = _run(capsys, *SMALL, "--json", str(file), "--html", str(page))
    assert code == 0
    found = json.loads(file.read_text())
    assert len(found["candidates"]) == 3
    for candidate in found["candidates"]:
        assert candidate.keys() >= KEYS
        stages = candidate["peak_memory_bytes"]["stages"]
        assert len(stages) == candidate["layout"]["pipeline"]
        assert all(sum(s["by_category"].values()) == s["total"] for s in stages)
    best = found["candidates"][0]
    assert f"{best['step_seconds']:.3f}" in out
    assert "Refused" in out
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_presets_of_collectives_compete_where_that_is_asked_for(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(plan_file, "_FOLDER", tmp_path)
    narrow = (*SMALL[:-1], "planner.rows=40", "planner.pipeline=[4]", "planner.recompute=[full]")
    found = {}
    for presets in ("[plain]", "[zeropp]", "[plain,zeropp]"):
        code, out, _ = _run(
            capsys, "model=gpt_22b", *narrow[1:], "cluster=frontier_mi250x", "precision=bf16",
            f"planner.collectives={presets}", "--json", str(tmp_path / "plan.json"),
            "--save", "chosen",
        )  # fmt: skip
        assert code == 0
        found[presets] = json.loads((tmp_path / "plan.json").read_text())["candidates"]
    alone = [*found["[plain]"], *found["[zeropp]"]]
    seconds = [one["step_seconds"] for one in found["[plain,zeropp]"]]
    assert seconds == sorted(one["step_seconds"] for one in alone)[: len(seconds)]
    assert "zeropp" in out
    chosen = found["[plain,zeropp]"][0]["layout"]["collectives"]
    assert f"override /collectives: {chosen}" in (tmp_path / "chosen.yaml").read_text()


def test_json_on_standard_output_is_nothing_but_json(capsys):
    code, out, _ = _run(capsys, *SMALL, "--this", "--json", "-")
    assert code == 0
    assert json.loads(out)["candidates"][0]["layout"]["pipeline"] == 8


def test_this_judges_the_layout_as_it_is_and_says_why_it_cannot_run(capsys):
    overrides = ["experiment=frontier_22b", "planner.nodes=2", "parallel.pipeline=2"]
    code, out, _ = _run(capsys, "--this", "--json", "-", *overrides)
    assert code == 0
    (judged,) = json.loads(out)["candidates"]
    assert judged["layout"]["pipeline"] == 2
    assert judged["refused_reason"].startswith("memory: stage")


def test_nothing_that_fits_is_an_error(capsys):
    code, _, err = _run(capsys, "experiment=frontier_1t", "planner.nodes=1")
    assert code == 2
    assert "configuration error at planner" in err


def test_a_scaling_study_has_a_point_for_each_number_of_nodes(capsys):
    code, out, _ = _run(capsys, *SMALL, "planner.nodes=[4,8]", "--json", "-")
    assert code == 0
    points = json.loads(out)["scaling"]
    assert [point["nodes"] for point in points] == [4, 8]
    assert points[0]["weak_efficiency"] == points[0]["strong_efficiency"] == 1


def test_a_saved_plan_is_the_layout_that_was_found(capsys, tmp_path, monkeypatch):
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "frontier_22b.yaml").write_text((plan_file._FOLDER / "frontier_22b.yaml").read_text())
    monkeypatch.setattr(plan_file, "_FOLDER", folder)
    code, out, _ = _run(capsys, *SMALL, "--save", "my_plan")
    assert code == 0
    assert str(folder / "my_plan.yaml") in out
    text = (folder / "my_plan.yaml").read_text()
    assert "# ranks: 64" in text
    assert "srun -N 8" in text
    code, _, err = _run(capsys, *SMALL, "--save", "frontier_22b")
    assert code == 2
    assert "--save" in err


def test_a_saved_plan_composes_to_the_layout(monkeypatch):
    base = decode(compose(["experiment=frontier_22b"]))
    found = plan._judge_this(decode(compose([*SMALL])))
    text = experiment_text("x", SMALL, found.best[0])
    path = plan_file._FOLDER / "test_only_plan.yaml"
    path.write_text(text)
    try:
        config = decode(compose(["experiment=test_only_plan"]))
    finally:
        path.unlink()
    assert config.model == base.model
    assert config.cluster == base.cluster
    assert config.parallel.pipeline == found.best[0].candidate.grid.pipeline
    factors = found.best[0].candidate.factors
    assert config.sharding.optimizer == factors.optimizer
    Candidate.of(config, 64, 8)
