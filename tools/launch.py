"""Show, or submit, the Slurm job of a configuration.

    python tools/launch.py experiment=frontier_1t      show the command
    python tools/launch.py --submit -A PROJECT --time=06:00:00 experiment=frontier_1t
    python tools/launch.py --submit --chain=8 ...          eight jobs, one after the other

Nodes, tasks, cores and devices follow from the experiment (`launch.nodes`) and the cluster file.
An argument with `=` that does not begin with a dash is an override for train.py; everything else is
handed to sbatch, after what is set here, so that it wins. A word that is neither, nor the value of
the option before it, is refused.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontier_llm.config import RunConfig, decode
from frontier_llm.errors import ConfigError, LaunchError
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.check import check_fits
from tools.compose import compose, fitted
from tools.options import ending

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {"hip": "scripts/frontier.sbatch", "cuda": "scripts/a100.sbatch"}
"""The script for each kind of device; nodes without one (`cpu`) take the second."""


@dataclass(frozen=True)
class Job:
    """What one configuration asks of Slurm."""

    script: str
    nodes: int
    ranks_per_node: int
    cores_per_rank: int
    devices_per_node: int
    chain: int
    """Jobs of an array that run one after the other, each where the one before stopped."""
    options: tuple[str, ...]
    """Of sbatch, from the command line."""
    overrides: tuple[str, ...]
    """Of the configuration, from the command line."""

    @classmethod
    def of(
        cls, config: RunConfig, chain: int, options: Sequence[str], overrides: Sequence[str]
    ) -> "Job":
        """Derive the resources of a configuration."""
        cluster = config.cluster
        per_node = cluster.ranks_per_node
        on_cpu = cluster.device.kind == "cpu"
        return cls(
            script=SCRIPTS.get(cluster.device.kind, SCRIPTS["cuda"]),
            nodes=config.launch.nodes or -(-config.launch.ranks // per_node),
            ranks_per_node=per_node,
            cores_per_rank=cluster.cores_per_rank,
            devices_per_node=0 if on_cpu else per_node,
            chain=chain,
            options=tuple(options),
            overrides=tuple(overrides),
        )

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    @property
    def command(self) -> list[str]:
        """The command that submits it, to be run in the repository's root."""
        resources = [
            f"--nodes={self.nodes}",
            f"--ntasks-per-node={self.ranks_per_node}",
            f"--cpus-per-task={self.cores_per_rank}",
            f"--gpus-per-node={self.devices_per_node}",
        ]
        array = [f"--array=1-{self.chain}%1"] if self.chain > 1 else []
        return ["sbatch", *resources, *array, *self.options, self.script, *self.overrides]

    def resources(self) -> str:
        """Say in words what is asked for."""
        devices = f"{self.nodes * self.devices_per_node} devices" if self.devices_per_node else ""
        parts = [
            f"{self.nodes} nodes",
            f"{self.ranks} ranks ({self.ranks_per_node} a node)",
            devices or "no devices",
            f"{self.ranks * self.cores_per_rank} cores ({self.cores_per_rank} a rank)",
        ]
        chain = f"\nchain      {self.chain} jobs, one after the other" if self.chain > 1 else ""
        return "resources  " + ", ".join(parts) + chain


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the job, submit it if asked to; return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(__doc__)
        return 0
    job, submit = _read(arguments)
    print(f"{job.resources()}\ncommand    {shlex.join(job.command)}", flush=True)
    if submit:
        _submit(job)
    return 0


def _read(arguments: Sequence[str]) -> tuple[Job, bool]:
    """Sort the command line and check what it asks for, as every rank would.

    Raises:
        ConfigError: the run would be refused on that many ranks, the chain is no number, or a word
            belongs to nothing.
    """
    _check_words(arguments)
    chains = [argument for argument in arguments if argument.startswith("--chain=")]
    rest = [argument for argument in arguments if argument not in ("--submit", *chains)]
    overrides = [argument for argument in rest if _is_override(argument)]
    options = [argument for argument in rest if not _is_override(argument)]
    values = compose(overrides)
    job = Job.of(decode(values), _length(chains), options, overrides)
    config = decode(fitted(values, job.ranks))
    candidate = Candidate.of(config, job.ranks, job.ranks_per_node)
    if config.plan == "check":
        check_fits(candidate)
    return job, "--submit" in arguments


def _check_words(arguments: Sequence[str]) -> None:
    """Refuse words that sbatch would take for its script.

    Raises:
        ConfigError: one is no override, no option and not the value of the option before it.
    """
    for before, word in pairwise(["", *arguments]):
        if word == "--chain":
            raise ConfigError(word, "no number", "--chain=N", "write --chain=8 for eight jobs")
        if not (word.startswith("-") or _is_override(word) or _wants_value(before)):
            raise ConfigError(
                "the command line", word, "key=value, or an option of sbatch",
                "write experiment=NAME, or join a value to its option: --option=VALUE",
            )  # fmt: skip


def _wants_value(option: str) -> bool:
    """Whether the next word can be its value: `-A` and `--account`, not `-N2` or `--nodes=2`."""
    is_short = len(option) == len("-A") and option.startswith("-")
    is_long = option.startswith("--") and "=" not in option and option != "--submit"
    return is_short or is_long


def _is_override(argument: str) -> bool:
    return not argument.startswith("-") and ("=" in argument or argument.startswith("~"))


def _length(chains: Sequence[str]) -> int:
    if not chains:
        return 1
    text = chains[-1].removeprefix("--chain=")
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(
            "--chain", text, "a number of jobs, 1 or more", "write --chain=8 for eight jobs"
        )
    return int(text)


def _submit(job: Job) -> None:
    """Hand the job to Slurm.

    Raises:
        LaunchError: there is no sbatch here, or it refused the job; its words are shown.
    """
    try:
        done = subprocess.run(job.command, cwd=ROOT, env=os.environ, check=False)
    except FileNotFoundError:
        raise LaunchError(
            "sbatch is not on this machine: submit from a login node of the cluster, or copy the "
            "command above"
        ) from None
    if done.returncode:
        raise LaunchError(f"sbatch refused the job (exit code {done.returncode}), see above")


if __name__ == "__main__":
    sys.exit(ending(main))
