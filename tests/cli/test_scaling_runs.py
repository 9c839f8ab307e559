"""The jobs of a scaling curve, and the scaling runs on Frontier."""

import shlex

import pytest

from docs.generate import planner_page
from docs.generate.blocks import ROOT
from frontier_lab.jobs.launch import main
from frontier_llm.cli.compose import compose
from frontier_llm.cli.dry_run import build
from frontier_llm.cli.experiments import composed
from frontier_llm.config import decode
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import estimate
from tests.covering import covering

pytestmark = pytest.mark.slow

FRONTIER_PAGE = ROOT / "docs" / "running-on-frontier.md"
RUNS = planner_page.LAYOUTS


def shown(capsys, *arguments):
    """Return the overrides of each job that the command prints."""
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("command")]
    return [[word for word in words if "=" in word and word[0] != "-"] for words in commands]


def candidate(overrides):
    """Return the layout of a job on its own number of ranks."""
    config = decode(compose(overrides))
    per_node = config.cluster.ranks_per_node
    return Candidate.of(config, config.launch.nodes * per_node, per_node)


def weak_batch(curves):
    """Return the samples on the fewest nodes in weak scaling."""
    config = composed(f"experiment={curves.experiment}")
    ranks = config.planner.nodes[0] * config.cluster.ranks_per_node
    return curves.replica_batch * ranks // (config.parallel.tensor * config.parallel.pipeline)


@pytest.mark.exhaustive
def test_each_job_has_its_nodes_and_in_weak_scaling_its_batch(capsys):
    given = ["experiment=frontier_22b", "planner.nodes=[2,4,8]", "data.global_batch=32"]
    strong, weak = (
        [decode(compose(job)) for job in shown(capsys, f"--scaling={curve}", *given)]
        for curve in ("strong", "weak")
    )
    assert [config.launch.nodes for config in strong] == [2, 4, 8]
    assert [config.launch.nodes for config in weak] == [2, 4, 8]
    assert [config.data.global_batch for config in strong] == [32, 32, 32]
    assert [config.data.global_batch for config in weak] == [32, 64, 128]


@pytest.mark.parametrize("curves", RUNS, ids=lambda curves: curves.experiment)
@pytest.mark.parametrize("curve", covering(["weak", "strong"], ["weak"]))
def test_the_runs_on_frontier_can_be_started_and_have_time_to_finish(capsys, curves, curve):
    first = [f"data.global_batch={weak_batch(curves)}"] if curve == "weak" else []
    jobs = shown(capsys, f"--scaling={curve}", f"experiment={curves.experiment}", *first)
    assert len(jobs) == 4
    for job in jobs:
        planned = candidate(job)
        config, replicas = planned.config, planned.grid.data
        strong_batch = composed(f"experiment={curves.experiment}").data.global_batch
        wanted = curves.replica_batch * replicas if curve == "weak" else strong_batch
        assert config.data.global_batch == wanted
        seconds = estimate(planned).time.seconds
        assert 2 * seconds < config.watchdog.first_step_seconds
        assert seconds < config.watchdog.evaluation_seconds


@pytest.mark.parametrize("curves", RUNS, ids=lambda curves: curves.experiment)
def test_the_stages_of_the_smallest_runs_are_as_planned(curves):
    """`frontier-llm dry-run` builds those of the largest."""
    nodes = composed(f"experiment={curves.experiment}").planner.nodes[0]
    planned = candidate([f"experiment={curves.experiment}", f"launch.nodes={nodes}"])
    assert len(build(planned, every=False)) == len(planned.stages.kinds)


def test_the_table_of_the_runs_is_current():
    expected = "\n".join(planner_page.recipes_table())
    block = f"<!-- scaling_runs -->\n{expected}\n<!-- end of scaling_runs -->"
    assert block in FRONTIER_PAGE.read_text()


@pytest.mark.parametrize("curves", planner_page.CURVES.values(), ids=lambda c: c.experiment)
def test_the_page_gives_the_batch_of_weak_scaling(curves):
    command = f"experiment={curves.experiment} data.global_batch={weak_batch(curves)}\n"
    page = FRONTIER_PAGE.read_text().replace("\\\n  ", "")
    assert f"launch --scaling=weak -A PROJECT {command}" in page


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--scaling=flat", "planner.nodes=[1,2]"], "--scaling"),
        (["--scaling", "planner.nodes=[1,2]"], "--scaling"),
        (["--scaling=weak"], "planner.nodes"),
        (["--scaling=weak", "planner.nodes=[3,4]", "data.global_batch=4"], "planner.nodes"),
        (["--scaling=strong", "experiment=frontier_175b_scaling", "planner.nodes=[16,8]",
          "data.micro_batch=8"], "plan"),
    ],
)  # fmt: skip
def test_a_curve_that_cannot_run_is_refused_before_a_job_is_shown(capsys, arguments, key):
    with pytest.raises(ConfigError) as caught:
        main(arguments)
    assert caught.value.key == key
    assert capsys.readouterr().out == ""
