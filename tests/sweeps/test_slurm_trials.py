"""Sweeps on Slurm: each job has the nodes of its trial, and results keep their order.

The runs need the programs of Slurm and root (benchmarks/faults/slurm_lab), and are skipped
elsewhere.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra.core.plugins import Plugins

from benchmarks.faults.slurm_lab.cluster import SlurmCluster, missing
from benchmarks.faults.slurm_lab.nodes import DEVICE
from frontier_lab.sweeps.slurm_trials import NodesPerTrialLauncher
from frontier_lab.sweeps.sweep_trials import Trial
from tests.patience import patient

ROOT = Path(__file__).parents[2]
SMALL = (
    "hydra/launcher=submitit_slurm", "hydra.launcher.tasks_per_node=1", "launch.ranks_per_node=1",
    "model=gpt_tiny", "model.layers=2", "model.hidden=32", "model.heads=2", "precision=fp32",
    "data.sequence_length=32", "data.global_batch=12", "parallel.pipeline=1", "trainer.steps=4",
    "trainer.evaluate_batches=1",
)  # fmt: skip
"""Trials with one rank per node, so that their numbers of ranks show their numbers of nodes."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Start a Slurm cluster with three nodes."""
    if reason := missing():
        pytest.skip(f"no Slurm can be started here: {reason}")
    folder = tmp_path_factory.mktemp("slurm")
    with SlurmCluster(folder / "lab", 3, 4, 1, folder / "local") as running:
        yield running


def sweep(cluster, folder, *axes):
    """Run a sweep as a user does; return its trials and the fields of their jobs."""
    environ = {
        "USER": "root", **os.environ, **cluster.environ,
        "GLOO_SOCKET_IFNAME": DEVICE, "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [sys.executable, "-m", "frontier_llm", "sweep", *SMALL, *axes]
    ended = subprocess.run(
        [*command, f"hydra.sweep.dir={folder}"], cwd=folder.parent, env=environ,
        capture_output=True, text=True, timeout=patient(125), check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "Traceback" not in ended.stderr
    shown = cluster.ask("scontrol", "--oneliner", "show", "job").splitlines()
    jobs = [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in shown]
    trials = [Trial.read(path.parent) for path in sorted(folder.glob("[0-9]/trial.json"))]
    return trials, [job for job in jobs if job.get("WorkDir") == str(folder.parent)]


@pytest.mark.exhaustive
def test_jobs_have_the_nodes_of_trials_and_keep_their_order(cluster, tmp_path):
    """A search over the numbers of nodes assigns each value to the settings that gave it."""
    trials, jobs = sweep(
        cluster, tmp_path / "sweep", "hydra/sweeper=optuna", "hydra/sweeper/sampler=grid",
        "hydra.sweeper.n_trials=3", "launch.nodes=choice(3,1,2)", "data.micro_batch=1",
    )  # fmt: skip
    asked = [next(o for o in trial.overrides if o.startswith("launch.nodes")) for trial in trials]
    assert sorted(asked) == ["launch.nodes=1", "launch.nodes=2", "launch.nodes=3"]
    assert [f"launch.nodes={trial.ranks}" for trial in trials] == asked
    assert {trial.status for trial in trials} == {"done"}
    assert sorted(job["NumNodes"] for job in jobs) == ["1", "2", "3"]
    assert {job["JobState"] for job in jobs} == {"COMPLETED"}
    assert not any("ArrayJobId" in job for job in jobs)

    best = yaml.safe_load((tmp_path / "sweep/optimization_results.yaml").read_text())
    fastest = max(trials, key=lambda trial: trial.tokens_per_second)
    assert best["best_value"] == fastest.tokens_per_second
    assert best["best_params"] == {"launch.nodes": fastest.ranks}


@pytest.mark.exhaustive
def test_trials_with_equal_nodes_are_one_array(cluster, tmp_path):
    trials, jobs = sweep(cluster, tmp_path / "sweep", "launch.nodes=2", "data.micro_batch=1,2")
    assert [(trial.status, trial.ranks) for trial in trials] == [("done", 2)] * 2
    assert [f"data.micro_batch={n}" in trials[n - 1].overrides for n in (1, 2)] == [True] * 2
    assert [job["NumNodes"] for job in jobs] == ["2", "2"]
    assert len({job["ArrayJobId"] for job in jobs}) == 1
    summaries = tmp_path.glob("sweep/*/run/summary.json")
    assert [len(json.loads(path.read_text())["ranks"]) for path in summaries] == [2, 2]


def test_a_trial_without_nodes_has_those_of_the_launcher():
    launcher = NodesPerTrialLauncher(nodes=3)
    trials = [["launch.nodes=16", "a=1"], ["+launch.nodes=2"], ["a=2"]]
    assert [launcher._nodes(overrides) for overrides in trials] == [16, 2, 3]


def test_hydra_makes_this_launcher():
    name = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
    assert Plugins.instance().class_name_to_class[name] is NodesPerTrialLauncher
