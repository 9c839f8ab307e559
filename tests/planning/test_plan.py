"""frontier-llm plan: what it prints, what it writes, what it refuses."""

import json
import re
import shutil

import pytest
from rich.console import Console

from frontier_lab.commands import explain_layout, plan
from frontier_lab.commands.planned_experiment import experiment_text
from frontier_lab.jobs import launch
from frontier_lab.jobs.launch_checks import forecast
from frontier_lab.planning.plan_json import layout_json
from frontier_llm.cli.compose import compose, configured
from frontier_llm.cli.options import run_command
from frontier_llm.cli.package_files import CONF, CONF_DIR_VARIABLE
from frontier_llm.config import decode
from frontier_llm.planner.candidate import Candidate, ranks_to_plan
from frontier_llm.planner.choice import choose
from frontier_llm.planner.estimate import estimate
from tests.covering import covering

pytestmark = pytest.mark.slow

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


@pytest.fixture
def conf(tmp_path, monkeypatch):
    """Copy conf/, where a test may save: other tests list the repository's at the same time."""
    copied = shutil.copytree(CONF, tmp_path / "conf")
    monkeypatch.setenv(CONF_DIR_VARIABLE, str(copied))
    return copied


def _run(capsys, *arguments):
    code = run_command(lambda: plan.main(arguments))
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
    assert f"{best['step_seconds']:.1f}" in out
    assert "Refused" in out
    assert page.read_text().startswith("<!DOCTYPE html>")
    counts = (
        f"{found['examined']} legal combinations before the choice of sharding factors; with "
        f"factors, {found['timed']} layouts with a predicted time"
    )
    assert counts in " ".join(out.split())
    assert counts in page.read_text()


def test_tables_are_narrow_and_links_keep_their_order(capsys):
    code, out, _ = _run(capsys, "experiment=frontier_1t_tp8", "planner.tensor=[8]")
    assert code == 0
    lines = [line.rstrip() for line in out.splitlines() if not line.startswith("Layout 1: par")]
    assert max(map(len, lines)) <= 120
    heads = next(line for line in lines if "PPxC" in line)
    links = [link.name for link in decode(compose(["cluster=frontier_mi250x"])).cluster.links]
    shown = [name for name in re.findall(r"(\S+) s\b", heads) if name in links]
    assert len(shown) > 1
    assert shown == [name for name in links if name in shown]
    assert "HFU" not in heads, "nothing is recomputed, so HFU is MFU"
    assert "all layouts: TP 8, recompute none" in " ".join(lines)


def test_presets_of_collectives_compete_where_that_is_asked_for(capsys, conf, tmp_path):
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
    assert sorted(seconds) == sorted(one["step_seconds"] for one in alone)[: len(seconds)]
    assert "zeropp" in out
    chosen = found["[plain,zeropp]"][0]["layout"]["collectives"]
    assert f"override /collectives: {chosen}" in (conf / "experiment" / "chosen.yaml").read_text()


def test_json_on_standard_output_is_nothing_but_json(capsys):
    code, out, _ = _run(capsys, *SMALL, "--this", "--json", "-")
    assert code == 0
    assert json.loads(out)["candidates"][0]["layout"]["pipeline"] == 8


@pytest.mark.parametrize("command", [plan, explain_layout])
@pytest.mark.parametrize(
    ("overrides", "is_assumed"),
    [
        ([], True), (["cluster=auto"], True), (["cluster=cpu_laptop"], False),
        (["cluster=h100_8"], False), (["experiment=frontier_1_4b"], False),
    ],
)  # fmt: skip
def test_a_cluster_that_nobody_chose_is_named(capsys, command, overrides, is_assumed):
    assert run_command(lambda: command.main(overrides)) == 0
    said = capsys.readouterr().out.splitlines()[0]
    assert said.lower().startswith("cluster: cpu_laptop, because this machine") == is_assumed
    assert ("add cluster=NAME: a100_40g_8, a100_80g" in said) == is_assumed


def test_this_layout_is_checked_and_says_why_it_cannot_run(capsys):
    overrides = ["experiment=frontier_22b", "planner.nodes=2", "parallel.pipeline=2"]
    code, out, _ = _run(capsys, "--this", "--json", "-", *overrides)
    assert code == 0
    (estimated,) = json.loads(out)["candidates"]
    assert estimated["layout"]["pipeline"] == 2
    assert estimated["refused_reason"].startswith("memory: stage")


@pytest.mark.parametrize(("hidden", "warns"), [(14400, True), (12288, False)])
def test_heads_that_gpus_read_slowly_are_named(capsys, hidden, warns):
    code, out, _ = _run(
        capsys, "experiment=frontier_175b", "planner.nodes=128", "--this",
        f"model.hidden={hidden}", "model.heads=96", f"model.ffn={4 * hidden}",
    )  # fmt: skip
    assert code == 0
    assert ("warning: heads of 150 elements" in out) == warns
    assert ("has 144 or 152" in out) == warns


@pytest.mark.parametrize(("cluster", "is_estimate"), [("a100_80g", False), ("mi300x_8", True)])
def test_times_without_a_measurement_are_called_estimates(capsys, cluster, is_estimate):
    """Also where a plan is submitted or saved."""
    words = ["experiment=frontier_22b", f"cluster={cluster}", "planner.nodes=2"]
    _, printed, _ = _run(capsys, "--this", *words)
    config = decode(compose(words))
    found = estimate(Candidate.of(config, *ranks_to_plan(config)))
    submitted, _ = forecast(found.candidate, None, done=0, chain=1, stops=True)
    saved = experiment_text("drawn", words, found)
    for text in (printed, submitted, saved):
        assert (f"estimates: no speed of {cluster}" in " ".join(text.split())) is is_estimate


def test_nothing_that_fits_is_an_error(capsys):
    code, _, err = _run(capsys, "experiment=frontier_1t", "planner.nodes=1")
    assert code == 2
    assert "configuration error at planner" in err
    assert "none of which can run" in err


def test_constraints_without_a_layout_name_the_ranks(capsys):
    code, _, err = _run(capsys, *SMALL, "planner.tensor=[3]")
    assert code == 2
    assert "no layout of gpt_22b on 64 ranks" in err
    assert "planner.tensor" in err


def test_a_scaling_study_has_a_point_for_each_number_of_nodes(capsys):
    code, out, _ = _run(capsys, *SMALL, "planner.nodes=[4,8]", "--json", "-")
    assert code == 0
    points = json.loads(out)["scaling"]
    assert [point["nodes"] for point in points] == [4, 8]
    assert points[0]["weak_efficiency"] == points[0]["strong_efficiency"] == 1


@pytest.mark.parametrize("option", [["--save", "my_plan"], ["--html", "page.html"]])
def test_a_list_of_nodes_has_no_one_layout_to_write(capsys, conf, tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    code, _, err = _run(capsys, *SMALL, "planner.nodes=[4,8]", *option)
    assert code == 2
    assert f"configuration error at {option[0]}" in err
    assert "planner.nodes" in err
    assert not (tmp_path / "page.html").exists()


def test_a_layout_that_cannot_run_is_not_saved(capsys, conf):
    overrides = ["experiment=frontier_22b", "planner.nodes=2", "parallel.pipeline=2"]
    code, _, err = _run(capsys, "--this", "--save", "my_plan", *overrides)
    assert code == 2
    assert "configuration error at --save" in err
    assert "refused for memory" in err
    assert not (conf / "experiment" / "my_plan.yaml").exists()


def test_what_is_removed_cannot_be_saved(capsys, conf):
    removed = "~cluster.device.calibration.products.fp32"
    code, _, err = _run(capsys, "--this", "--save", "my_plan", *SMALL, removed)
    assert code == 2
    assert "configuration error at --save" in err
    assert removed in err


def test_help_says_all_that_the_tool_does(capsys):
    with pytest.raises(SystemExit):
        plan.main(["--help"])
    assert plan.__doc__.strip() in capsys.readouterr().out


def test_a_saved_plan_says_how_to_run_it_and_replaces_nothing(capsys, conf):
    code, out, _ = _run(capsys, *SMALL, "--save", "my_plan")
    assert code == 0
    path = conf / "experiment" / "my_plan.yaml"
    assert str(path) in out
    text = path.read_text()
    assert "# ranks: 64" in text
    assert "srun -N 8" in text
    code, _, err = _run(capsys, *SMALL, "--save", "frontier_22b")
    assert code == 2
    assert "--save" in err


SEARCHES = {
    "one stage": ("planner.pipeline=[1]", "launch.ranks=4"),
    "chunks": ("model.layers=8", "planner.pipeline=[2,4]", "launch.ranks=4"),
    "two ranks per node": ("launch.ranks_per_node=2", "launch.ranks=4"),
    "formats": ("collectives=zeropp", "launch.ranks=4", "planner.pipeline=[1]"),
    "searched formats": ("planner.collectives=[plain,zeropp]", "planner.pipeline=[1,2]"),
    "context": ("planner.context=[2,1]", "launch.ranks=4", "planner.pipeline=[1,2]"),
    "auto": ("parallel.context=auto", "data.sequence_length=512", "launch.ranks=2"),
    "a base": ("experiment=laptop_3d", "planner.tensor=[1]"),
    "nodes": (*SMALL[:-1], "planner.tensor=[1,4]"),
}


@pytest.mark.parametrize(
    "name",
    covering(
        SEARCHES,
        ("one stage", "chunks", "two ranks per node", "formats", "a base", "context", "nodes"),
    ),
)
def test_every_layout_of_a_search_can_be_saved_and_typed(conf, name):
    words = SEARCHES[name]
    config = configured([*words, "planner.rows=100"], plan.SEARCHED).config
    found = plan._search(plan._configs(config, words), Console(quiet=True)).best
    for layout in found[:: max(1, len(found) // 3)]:
        text = experiment_text("drawn", words, layout)
        (conf / "experiment" / "drawn.yaml").write_text(text)
        for command in (["experiment=drawn"], [*words, *plan.overrides(layout).split()]):
            typed = configured(command).config
            ranks = ranks_to_plan(typed)
            same = Candidate.of(choose(typed, *ranks), *ranks)
            assert same.description == layout.candidate.description, command
            assert same.grid == layout.candidate.grid
            assert same.config.collectives == layout.candidate.config.collectives


def test_a_saved_plan_of_several_nodes_becomes_a_job_of_them(capsys, conf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _run(capsys, *SMALL, "--save", "my_plan")[0] == 0
    assert run_command(lambda: launch.main(["experiment=my_plan"])) == 0
    assert "8 nodes, 64 ranks" in capsys.readouterr().out


SAME_TWICE = {
    "an experiment alone": SMALL,
    "what is said before an experiment": (
        "model=gpt_1_4b",
        "data.sequence_length=1024",
        "parallel.layers_per_stage=[3,3,3,3,3,3,3,3]",
        "kernels=torch",
        "optimizer.learning_rate=1e-4",
        "cluster.links.0.latency_us=3",
        *SMALL,
    ),
    "no experiment": (
        "model=gpt_1_4b",
        "cluster=frontier_mi250x",
        "parallel={pipeline: 8}",
        "optimizer.decay_steps=${trainer.steps}",
        "sharding=zero3",
        "sharding.units_in_flight=3",
        *SMALL[1:],
    ),
}


@pytest.mark.parametrize("name", covering(SAME_TWICE, ["an experiment alone", "no experiment"]))
def test_a_saved_plan_composes_to_the_layout_that_was_chosen(capsys, conf, name):
    overrides = SAME_TWICE[name]
    code, out, err = _run(capsys, *overrides, "--json", "-", "--save", "my_plan")
    assert code == 0, err
    (chosen, *_) = json.loads(out)["candidates"]
    asked, saved = decode(compose(overrides)), decode(compose(["experiment=my_plan"]))
    found = layout_json(estimate(Candidate.of(saved, 64, 8)))
    assert json.loads(json.dumps(found)) == chosen
    for section in ("model", "cluster", "optimizer", "precision", "kernels", "trainer"):
        assert getattr(saved, section) == getattr(asked, section), section
    assert saved.data.sequence_length == asked.data.sequence_length
    assert saved.sharding.units_in_flight == asked.sharding.units_in_flight
