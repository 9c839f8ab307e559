r"""Print or submit the job of Slurm or PBS that trains a configuration.

usage: frontier-llm launch [--submit] [--chain=N] [--scaling=weak|strong]
                           [OPTION OF SBATCH OR QSUB ...] [key=value ...]

    frontier-llm launch experiment=frontier_1t           print the command
    frontier-llm launch --submit -A PROJECT --time=06:00:00 experiment=frontier_1t
    frontier-llm launch --submit --chain=8 ...           eight jobs, one after the other
    frontier-llm launch --scaling=strong planner.nodes=[1,2,4] ...   a job per number of nodes

The experiment (`launch.nodes`) and the cluster file determine the nodes, tasks, cores and devices.
An argument `key=value` without a leading dash is an override, as for frontier-llm train. All other
options are passed to sbatch, or to qsub for a cluster with PBS. Refused are options that contradict
those that follow from the experiment, options of Slurm for a cluster with PBS, and a word that is
neither an override, nor an option, nor the value of the preceding option.

    frontier-llm launch -A PROJECT -q debug -l walltime=00:20:00 -l filesystems=home:eagle \
      experiment=datastates_7b                           qsub on Polaris

`--scaling` prints or submits one job per number in `planner.nodes`. With `strong` all jobs have the
same global batch. With `weak` the batch grows in proportion to the nodes, from data.global_batch on
the first number of nodes. All jobs are checked before the first is submitted.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from frontier_lab.jobs.launch_checks import check_data, check_run_dir, forecast
from frontier_lab.jobs.launch_options import (
    check_qsub_options,
    check_sbatch_options,
    check_words,
    is_override,
    time_limit,
    unknown_to_sbatch,
    with_joined_values,
)
from frontier_lab.predicted_run import assumed_cluster, with_known_share
from frontier_llm.cli.compose import compose, configured
from frontier_llm.cli.group_files import key_of
from frontier_llm.cli.kept_defaults import warn_of_kept_defaults
from frontier_llm.cli.package_files import CONF_DIR_VARIABLE, SCRIPTS
from frontier_llm.cli.run_preparation import check_run, check_start
from frontier_llm.config import RunConfig, decode
from frontier_llm.errors import ConfigError, LaunchError
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.choice import choose
from frontier_llm.planner.space import with_grown_batch
from frontier_llm.saving import run_directory
from frontier_llm.units import counted

PBS = ".pbs"
"""Suffix of the job scripts for PBS; the others are for Slurm."""
OTHER_SITES = "a100.sbatch"
"""The job script of CUDA and CPU clusters whose site has no script of its own."""
CURVES = ("weak", "strong")
"""Values of `--scaling`."""
SCRIPTS_VARIABLE = "FRONTIER_LLM_SCRIPTS"
"""Environment variable with the folder of the files that a job script sources."""


@dataclass(frozen=True)
class Job:
    """The resources of one configuration, and how to submit it."""

    script: str
    """File that sbatch or qsub runs."""
    nodes: int
    ranks_per_node: int
    cores_per_rank: int
    devices_per_node: int
    """Number of GPUs that a node needs; 0 to train on its cores."""
    chain: int
    """Number of jobs that run one after the other; each resumes where the previous one stopped."""
    options: tuple[str, ...]
    overrides: tuple[str, ...]
    checked: tuple[str, ...] = ()
    """Lines about what was checked and predicted."""

    @classmethod
    def of(
        cls, config: RunConfig, chain: int, options: Sequence[str], overrides: Sequence[str]
    ) -> "Job":
        """Derive the resources from a configuration; the other arguments are fields of the job."""
        cluster = config.cluster
        per_node = cluster.ranks_per_node
        on_cpu = cluster.device.kind == "cpu"
        return cls(
            script=_script(cluster.name, cluster.device.kind),
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
        """Total number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def command(self) -> list[str]:
        """The command that submits the job, to be run in the folder where the job is to work."""
        if self.is_pbs:
            place = [f"-lselect={self.nodes}:system={Path(self.script).stem}", "-lplace=scatter"]
            script = str(Path(self.script).absolute())
            options = _with_variables(self.options, "-v", ())
            return ["qsub", *place, *options, "--", script, *self.overrides]
        resources = [
            f"--nodes={self.nodes}",
            f"--ntasks-per-node={self.ranks_per_node}",
            f"--cpus-per-task={self.cores_per_rank}",
            f"--gpus-per-node={self.devices_per_node}",
        ]
        array = [f"--array=1-{self.chain}%1"] if self.chain > 1 else []
        options = _with_variables(self.options, "--export=", ("ALL",))
        return ["sbatch", *resources, *array, *options, self.script, *self.overrides]

    @property
    def is_pbs(self) -> bool:
        """Whether qsub submits the job, not sbatch."""
        return self.script.endswith(PBS)

    def resources(self) -> str:
        """Return the resources in words."""
        devices = self.nodes * self.devices_per_node
        parts = [
            counted(self.nodes, "node"),
            f"{counted(self.ranks, 'rank')} ({self.ranks_per_node} per node)",
            counted(devices, "device") if devices else "no devices",
            f"{counted(self.ranks * self.cores_per_rank, 'core')} ({self.cores_per_rank} per rank)",
        ]
        chain = f"\nchain      {self.chain} jobs, one after the other" if self.chain > 1 else ""
        return "\n".join(["resources  " + ", ".join(parts) + chain, *self.checked])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the jobs and submit them if `--submit` is given; return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(__doc__)
        return 0
    jobs, submit = _parse(arguments)
    for job in jobs:
        print(f"{job.resources()}\ncommand    {shlex.join(job.command)}", flush=True)
        if submit:
            _submit(job)
    if not submit:
        print("printed only, which is the default: --submit also submits", file=sys.stderr)
    return 0


def _parse(arguments: Sequence[str]) -> tuple[list[Job], bool]:
    """Return the checked jobs of a command line, and whether to submit them."""
    arguments = with_joined_values(arguments)
    check_words(arguments)
    chains = [argument for argument in arguments if argument.startswith("--chain=")]
    curves = [argument for argument in arguments if argument.startswith("--scaling=")]
    rest = [argument for argument in arguments if argument not in ("--submit", *chains, *curves)]
    overrides = [argument for argument in rest if is_override(argument)]
    options = [argument for argument in rest if not is_override(argument)]
    length = chains[-1].removeprefix("--chain=") if chains else "1"
    if not length.isdecimal() or int(length) < 1:
        raise ConfigError("--chain", length, "a number of jobs", "write --chain=8 for eight jobs")
    points = _points(curves[-1].removeprefix("--scaling="), overrides) if curves else [[]]
    submit = "--submit" in arguments
    jobs = []
    for point in points:
        replaced = set(map(key_of, point))
        words = [*(word for word in overrides if key_of(word) not in replaced), *point]
        jobs.append(_checked_job(int(length), options, words, submit=submit))
    return jobs, submit


def _points(curve: str, overrides: Sequence[str]) -> list[list[str]]:
    if curve not in CURVES:
        raise ConfigError(
            "--scaling", curve, " or ".join(CURVES), "write --scaling=weak or --scaling=strong"
        )
    if "run.dir" in map(key_of, overrides):
        wants = "none: each job makes its own folder below runs"
        raise ConfigError("run.dir", "a folder for several jobs", wants, "leave run.dir out")
    config = decode(compose(overrides))
    if not config.planner.nodes:
        wants = "the numbers of nodes of the curve"
        raise ConfigError("planner.nodes", "null", wants, "set planner.nodes=[1,2,4]")
    points = []
    for nodes in config.planner.nodes:
        point = [f"launch.nodes={nodes}"]
        if curve == "weak":
            grown = with_grown_batch(config, nodes, config.planner.nodes[0])
            point.append(f"data.global_batch={grown.data.global_batch}")
        points.append(point)
    return points


def _checked_job(
    chain: int, options: Sequence[str], overrides: Sequence[str], *, submit: bool
) -> Job:
    """Return a job whose configuration can run on its number of ranks, and that can save states."""
    composed = configured(overrides)
    if assumed := assumed_cluster(composed.config, overrides):
        raise ConfigError("cluster", assumed[0], "the cluster of the job", assumed[1])
    job = Job.of(composed.config, chain, options, overrides)
    _check_ranks(job, composed.config, overrides)
    if job.is_pbs:
        check_qsub_options(options, job.command[1:3])
    else:
        spares = os.environ.get("FRONTIER_LLM_SPARE_NODES", "")
        check_sbatch_options(options, job.command[1:5], int(spares) if spares.isdecimal() else 0)
    composed = composed.fitted(job.ranks)
    config = with_known_share(composed.config, partial(print, file=sys.stderr))
    config = choose(run_directory.kept_layers(config), job.ranks, job.ranks_per_node)
    candidate = Candidate.of(config, job.ranks, job.ranks_per_node)
    if config.plan == "check":
        check_run(candidate, composed, overrides)
    if chain > 1 and job.is_pbs:
        raise ConfigError(
            "--chain", str(chain), "no chain of jobs of PBS", "submit the jobs one by one"
        )
    return replace(job, checked=_checks(job, candidate, submit=submit))


def _checks(job: Job, candidate: Candidate, *, submit: bool) -> tuple[str, ...]:
    """Check the data, the run directory and the time of a job; return lines for its user.

    Unless the job is submitted, a lack of disk space or of time in the job script is only a
    warning, because the command may be used elsewhere or with other options.
    """
    config, is_given = candidate.config, "run.dir" in map(key_of, job.overrides)
    check_start(config)
    lines = [
        check_data(config, job.ranks, job.overrides),
        f"batch      {config.data.batch_in_words}",
    ]
    warn_of_kept_defaults(config, job.overrides, lambda text: lines.append(f"warning    {text}"))
    if not job.is_pbs:
        lines += [f"warning    {text}" for text in unknown_to_sbatch(job.options)]
    done, problem, todo = check_run_dir(candidate, is_given=is_given)
    if problem:
        if submit:
            raise LaunchError(f"{problem}\n  do: {todo}")
        lines.append(f"warning    {problem}: {todo}")
    limit = time_limit(job.options, Path(job.script))
    predicted, error = forecast(candidate, limit, done=done, chain=job.chain, stops=not job.is_pbs)
    if error and (submit or not (limit and limit.of_script)):
        raise error
    if error:
        predicted += f"\nwarning    {error.key}={error.got} is too short: {error.todo}"
    return (*lines, predicted)


def _check_ranks(job: Job, config: RunConfig, overrides: Sequence[str]) -> None:
    """Refuse a number of ranks that the job would not have: it has whole nodes."""
    ranks = config.launch.ranks
    if "launch.ranks" in map(key_of, overrides) and ranks != job.ranks:
        wants = f"the ranks of whole nodes, {job.ranks_per_node} each"
        if config.launch.nodes is not None:
            wants = f"{job.ranks}, the ranks of launch.nodes={job.nodes}"
        todo = f"set launch.nodes={-(-ranks // job.ranks_per_node)} instead of launch.ranks"
        raise ConfigError("launch.ranks", ranks, wants, todo)


def _script(cluster: str, kind: str) -> str:
    """Return the job script of a cluster, relative to the working folder if it is below."""
    site = cluster.partition("_")[0]
    names = [f"{site}.sbatch", f"{site}{PBS}", *([] if kind == "hip" else [OTHER_SITES])]
    path = next((SCRIPTS / name for name in names if (SCRIPTS / name).exists()), None)
    if path is None:
        raise ConfigError(
            "cluster", cluster, f"a cluster of AMD GPUs with a job script {SCRIPTS / names[0]}",
            f"copy frontier.sbatch and frontier_env.sh to {site}.sbatch and {site}_env.sh there, "
            "and replace modules and variables that are for Frontier",
        )  # fmt: skip
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _with_variables(
    options: Sequence[str], option: str, without_option: Sequence[str]
) -> list[str]:
    """Return options that also export the variables that the job needs, if any.

    The job script finds the files that it sources in `scripts` of the working folder, unless
    SCRIPTS_VARIABLE names another folder. `option` is the beginning of the option that exports a
    list of variables, of which the last one counts, and `without_option` the list without it.
    """
    variables = {}
    if Path("scripts").resolve() != SCRIPTS:
        variables[SCRIPTS_VARIABLE] = str(SCRIPTS)
    if conf_dir := os.environ.get(CONF_DIR_VARIABLE):
        variables[CONF_DIR_VARIABLE] = conf_dir
    words = [f"{name}={value}" for name, value in variables.items()]
    given = [text for text in options if text.startswith(option)]
    if not words:
        return list(options)
    exported = [given[-1].removeprefix(option)] if given else without_option
    others = (text for text in options if text not in given)
    return [f"{option}{','.join([*exported, *words])}", *others]


def _submit(job: Job) -> None:
    """Submit the job."""
    program = job.command[0]
    try:
        done = subprocess.run(job.command, check=False)
    except FileNotFoundError:
        raise LaunchError(
            f"{program} is not on this machine\n"
            "  do: submit from a login node of the cluster, or copy the command above"
        ) from None
    if done.returncode:
        raise LaunchError(
            f"{program} refused the job with exit code {done.returncode}\n"
            "  do: change what its message above names"
        )
