"""Trials on Slurm: each job has the nodes of its trial, and results keep their order."""

import time

import pytest
from hydra.core.plugins import Plugins
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher

from frontier_llm.cli.slurm_trials import NodesPerTrialLauncher


@pytest.fixture
def launched(monkeypatch):
    """Return the calls of hydra's launcher, which returns the numbers of its jobs, slowly."""
    calls = []

    def launch(self, job_overrides, initial_job_idx):
        calls.append((self.params["nodes"], len(job_overrides), initial_job_idx))
        time.sleep(0.05 if initial_job_idx == 7 else 0.0)
        return [initial_job_idx + index for index in range(len(job_overrides))]

    monkeypatch.setattr(SlurmLauncher, "launch", launch)
    return calls


def test_each_job_has_the_nodes_of_its_trial(launched):
    launcher = NodesPerTrialLauncher(nodes=3, array_parallelism=2)
    trials = [["launch.nodes=16", "a=1"], ["+launch.nodes=2"], ["a=2"]]
    assert launcher.launch(trials, 7) == [7, 8, 9]
    assert sorted(launched) == [(2, 1, 8), (3, 1, 9), (16, 1, 7)]
    assert launcher.params["nodes"] == 3


def test_trials_with_equal_nodes_are_one_array(launched):
    launcher = NodesPerTrialLauncher(nodes=3, array_parallelism=2)
    assert launcher.launch([["launch.nodes=4"], ["launch.nodes=4", "a=1"]], 0) == [0, 1]
    assert launched == [(4, 2, 0)]


def test_hydra_makes_this_launcher():
    name = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
    assert Plugins.instance().class_name_to_class[name] is NodesPerTrialLauncher
