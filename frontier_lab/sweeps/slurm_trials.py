"""Submit each trial of a sweep as a Slurm job with as many nodes as the trial asks for.

Hydra's launcher gives all jobs of a sweep the same resources. Importing this module replaces it, so
that `launch.nodes` can be an axis.
"""

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher

from frontier_llm.cli.group_files import key_of


class NodesPerTrialLauncher(SlurmLauncher):
    """Hydra's Slurm launcher, with a number of nodes per job."""

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Submit the jobs, wait for them, and return their results in the order of the jobs."""
        nodes = [self._nodes(overrides) for overrides in job_overrides]
        if len(set(nodes)) == 1:
            return self._with_nodes(nodes[0], job_overrides, initial_job_idx)
        with ThreadPoolExecutor(self.params["array_parallelism"]) as pool:
            jobs = [
                pool.submit(self._with_nodes, count, [overrides], initial_job_idx + index)
                for index, (count, overrides) in enumerate(zip(nodes, job_overrides, strict=True))
            ]
            return [job.result()[0] for job in jobs]

    def _nodes(self, overrides: Sequence[str]) -> int:
        """Return `launch.nodes` of a trial, or `hydra.launcher.nodes` if the trial has none."""
        given = {key_of(override): override.partition("=")[2] for override in overrides}
        return int(given.get("launch.nodes", self.params["nodes"]))

    def _with_nodes(
        self, nodes: int, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        launcher = copy.copy(self)
        launcher.params = {**self.params, "nodes": nodes}
        returns: Sequence[JobReturn] = SlurmLauncher.launch(
            launcher, job_overrides, initial_job_idx
        )
        return returns


# Hydra only instantiates classes of the package hydra_plugins, which it finds by this name.
Plugins.instance().class_name_to_class[f"{SlurmLauncher.__module__}.{SlurmLauncher.__name__}"] = (
    NodesPerTrialLauncher
)
