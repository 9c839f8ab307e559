"""Check the options of `frontier-llm launch`, most of which are those of sbatch or qsub."""

import difflib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from frontier_llm.cli.compose import groups
from frontier_llm.cli.group_files import key_of
from frontier_llm.config.decode import keys
from frontier_llm.errors import ConfigError

OWN_OPTIONS = ("--submit", "--chain", "--scaling", "--help")
"""Options of this command."""
PRINTING = ("--dry-run", "--dryrun", "--dry_run", "--print")
"""Options of other programs for what this command does without `--submit`."""
QSUB_LETTERS = "aAcCefGhIjJklmMNopPqrRSuvVWXz"
"""Options of qsub, which has no long ones for jobs (manual page of qsub in OpenPBS)."""
TIME, QUEUE = "-l walltime={}", "-q {}"
IN_QSUB = {
    "--time": TIME, "-t": TIME, "--partition": QUEUE, "-p": QUEUE, "--qos": QUEUE,
    "--account": "-A {}", "--job-name": "-N {}", "--output": "-o {}", "--error": "-e {}",
    "--nodes": "launch.nodes={}", "-N": "launch.nodes={}",
}  # fmt: skip
"""What replaces options of Slurm on a cluster with PBS."""

WITH_ASSIGNMENTS = ("-l", "-v", "-W", "--export")
"""Options whose value is a list of `name=value`."""
FLAGS = (
    "--contiguous --exclusive --hold --no-kill --no-requeue --overcommit --oversubscribe --reboot "
    "--parsable --quiet --requeue --spread-job --test-only --verbose --wait -H -I -O -Q -V -k -s"
).split()
"""Options of sbatch that do not take the next word as their value (manual page of sbatch)."""
WITH_VALUES = (
    "--account --comment --constraint --dependency --error --exclude --job-name --mail-user "
    "--nodelist --output --partition --qos --reservation "
    "-A -C -D -J -M -d -e -o -p -q -w -x"
).split()
"""Options of sbatch and qsub that need a value."""
RANKS, CORES = "cluster.ranks_per_node={}", "cluster.host.cores=N"
DECIDED = {
    "--nodes": "launch.nodes={}", "--ntasks": "launch.nodes=N", "--gpus": "launch.nodes=N",
    "--ntasks-per-node": RANKS, "--gpus-per-node": RANKS, "--cpus-per-task": CORES,
    "--gres": RANKS, "--array": "--chain=N",
}  # fmt: skip
"""What replaces options of sbatch that would change the resources of the configuration."""
LONG = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus", "-c": "--cpus-per-task", "-a": "--array"}
OTHERS = (
    "acctg-freq bb bbf begin chdir cluster-constraint clusters consolidate-segments container "
    "container-id core-spec cores-per-socket cpu-freq cpus-per-gpu deadline delay-boot "
    "distribution export export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq "
    "gpus-per-socket gpus-per-task gres-flags hint ignore-pbs input kill-on-invalid-dep licenses "
    "mail-type mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice nodefile "
    "ntasks-per-core ntasks-per-gpu ntasks-per-socket open-mode power prefer priority profile "
    "propagate resv-ports segment signal sockets-per-node stepmgr switches thread-spec "
    "threads-per-core time time-min tmp tres-bind tres-per-task uid usage use-min-nodes version "
    "wait-all-nodes wckey wrap"
).split()
"""Other long options of sbatch, without their dashes. Versions differ, so others only warn."""
_TIME_OF_SLURM = re.compile(r"(?:^|\s)(?:--time(?:[= ]|$)|-t ?)(\S*)", re.MULTILINE)
_TIME_OF_PBS = re.compile(r"(?:^|\s)-l(?:\S*,)?walltime=([^\s,]*)")


@dataclass(frozen=True)
class TimeLimit:
    """The longest time that a job may take."""

    seconds: float
    """Infinite if there is no limit."""
    text: str
    """The option that sets it, and its file unless it is on the command line."""
    of_script: bool
    """Whether it is the default of the job script."""


def time_limit(
    options: Sequence[str], script: Path, environ: Mapping[str, str] = os.environ
) -> TimeLimit | None:
    """Return the time limit of a job; None if only its queue or partition has one.

    Options of sbatch replace its environment variables, and these the directives of the script.
    """
    line = " ".join(options)
    if script.suffix == ".pbs":
        values = _TIME_OF_PBS.findall(line)
        seconds = seconds_of(values[-1], "pbs") if values else 0.0
        return TimeLimit(seconds, f"-l walltime={values[-1]}", False) if values else None
    directives = re.findall(r"^#SBATCH (.*)", script.read_text(), re.MULTILINE)
    variable = environ.get("SBATCH_TIMELIMIT")
    for text, origin in (
        (line, ""),
        (f"--time={variable}" if variable else "", " (SBATCH_TIMELIMIT)"),
        ("\n".join(directives), f" of {script}"),
    ):
        if values := _TIME_OF_SLURM.findall(text):
            seconds = seconds_of(values[-1], "slurm")
            return TimeLimit(seconds, f"--time={values[-1]}{origin}", str(script) in origin)
    return None


def seconds_of(text: str, system: Literal["slurm", "pbs"]) -> float:
    """Return a time limit in seconds, of any format of sbatch or qsub; infinity for no limit."""
    days, dash, clock = text.rpartition("-")
    numbers = [days, *clock.split(":")] if dash else clock.split(":")
    is_legal = all(number.isdecimal() for number in numbers) and len(numbers) <= 3 + bool(dash)
    if system == "slurm":
        if text.upper() in ("INFINITE", "UNLIMITED"):
            return math.inf
        units = [86400, 3600, 60, 1] if dash else [3600, 60, 1] if len(numbers) == 3 else [60, 1]
        formats = "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes "
        formats += "or days-hours:minutes:seconds"
    else:
        units, formats = [3600, 60, 1][-len(numbers) :], "hours:minutes:seconds, or seconds"
        is_legal = is_legal and not dash
    if not is_legal:
        raise ConfigError("the time limit", text or "none", formats, "write 06:00:00 for six hours")
    seconds = sum(unit * int(number) for unit, number in zip(units, numbers, strict=False))
    return seconds or math.inf


def check_sbatch_options(options: Sequence[str], resources: Sequence[str], spares: int) -> None:
    """Refuse options that contradict `resources`, those of the configuration, or make an array.

    The number of nodes may include `spares`, which wait for the loss of another node.
    """
    own = dict(word.split("=") for word in resources)
    own["--gres"] = own["--gpus-per-node"]
    with_spares = str(int(own["--nodes"]) + spares)
    for name, value, text in _named(options):
        # sbatch accepts abbreviations
        full = min((key for key in DECIDED if len(name) > 3 and key.startswith(name)), default=name)
        full, number = LONG.get(full, full), value.split(":")[-1]
        is_own = number in (own.get(full), with_spares if full == "--nodes" else None)
        if full in DECIDED and not (is_own or (full == "--gres" and "gpu" not in value)):
            todo = DECIDED[full].format(number if number.isdecimal() else "N")
            wants = f"{' '.join(resources)} of the configuration"
            raise ConfigError("the command line", text, wants, f"write {todo} instead")


def unknown_to_sbatch(options: Sequence[str]) -> Iterator[str]:
    """Yield a line for each long option that sbatch may refuse: a newer version has more options.

    An abbreviation of an option is known, as it is to sbatch.
    """
    known = [*FLAGS, *WITH_VALUES, *DECIDED, *(f"--{name}" for name in OTHERS)]
    for name, _, text in _named(options):
        if name.startswith("--") and not any(option.startswith(name) for option in known):
            similar = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            todo = f"did you mean {similar[0]}?" if similar else "sbatch --help lists its options"
            yield f"{text}: sbatch may not know {name}; {todo}"


def check_qsub_options(options: Sequence[str], resources: Sequence[str]) -> None:
    """Refuse options that qsub lacks or understands otherwise, or that contradict `resources`."""
    for name, value, text in _named(options):
        for part in value.split(",") if name == "-l" else ():
            if re.match("(select|nodes|place)=", part) and f"-l{part}" not in resources:
                number = re.sub(r"\D.*", "", part.partition("=")[2]) or "N"
                todo = f"leave it out: launch.nodes={number} sets the nodes"
                raise ConfigError("the command line", f"-l {part}", " ".join(resources), todo)
        # -N is the name of a job, which begins with no digit, and -p a priority
        other_meaning = {"-N": r"\d+", "-p": r".*[a-zA-Z].*"}.get(name)
        if name[1] in QSUB_LETTERS and not (other_meaning and re.fullmatch(other_meaning, value)):
            continue
        instead = IN_QSUB.get(name, "an option of qsub").format(value or "VALUE")
        raise ConfigError(
            "the command line", text, "options of qsub, because this cluster has PBS",
            f"write {instead}; a full set is -A PROJECT -q QUEUE -l walltime=00:20:00 "
            "-l filesystems=home:eagle",
        )  # fmt: skip


def _named(options: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each option, the value that it has if it takes one, and both as written."""
    for option, following in pairwise([*options, ""]):
        if option.startswith("-") and not option[1:].isdigit():
            short = (option[:2], "", option[2:])
            name, _, joined = option.partition("=") if option.startswith("--") else short
            value = joined or ("" if following.startswith("-") else following)
            yield name, value, f"{option} {value}" if value and not joined else option


def with_joined_values(arguments: Sequence[str]) -> list[str]:
    """Join options and values that look like overrides, as in `-l walltime=00:20:00`.

    A key of the configuration is always an override, because `-v` and `-W` take no value in sbatch.
    """
    known = {*groups(), *(key for key, _, _ in keys())}
    joined: list[str] = []
    for argument in arguments:
        before = joined[-1] if joined else ""
        is_value = not argument.startswith("-") and key_of(argument) not in known
        takes_value = "=" in argument and _takes_value(before) and before not in FLAGS
        if is_value and (before in WITH_ASSIGNMENTS or takes_value):
            joined[-1] += ("=" if before.startswith("--") else "") + argument
        else:
            joined.append(argument)
    return joined


def check_words(arguments: Sequence[str]) -> None:
    """Refuse mistyped options, and words that sbatch would take for the job script."""
    for word in arguments:
        _check_spelling(word)
    for before, word in pairwise(["", *arguments]):
        if not word.strip("-") or (
            word.startswith("--") and word.endswith("=") and word.count("=") == 1
        ):
            got = word or f"an empty word after {before}".rstrip()
            raise ConfigError("the command line", got, "a value", "add the value of the option")
        if word == "--chain":
            raise ConfigError(word, "no number", "--chain=N", "write --chain=8 for eight jobs")
        if word == "--scaling":
            raise ConfigError(
                word, "no curve", "--scaling=weak or --scaling=strong", "write --scaling=strong"
            )
        if before in WITH_VALUES and is_override(word):
            wants = f"the value of {before} after it"
            todo = f"write {before} VALUE {word}, or leave {before} out"
            raise ConfigError("the command line", f"{before} {word}", wants, todo)
        if not (word.startswith("-") or is_override(word) or _takes_value(before)):
            raise ConfigError(
                "the command line", word, "key=value, or an option of sbatch",
                "write experiment=NAME, or join a value to its option: --option=VALUE",
            )  # fmt: skip


def _check_spelling(word: str) -> None:
    name = word.partition("=")[0]
    if name in OWN_OPTIONS or not name.startswith("-"):
        return
    similar = difflib.get_close_matches(name, OWN_OPTIONS, n=1, cutoff=0.75)
    if name in PRINTING or similar:
        printing = "leave it out: the command is printed, and --submit also submits it"
        todo = f"did you mean {similar[0]}?" if similar else printing
        wants = f"one of {', '.join(OWN_OPTIONS)}, or an option of sbatch"
        raise ConfigError("the command line", word, wants, todo)


def _takes_value(option: str) -> bool:
    """Return whether an option takes the next word as `-A` and `--account` do, unlike `-N2`."""
    is_short = len(option) == len("-A") and option.startswith("-")
    is_long = option.startswith("--") and "=" not in option and option != "--submit"
    return is_short or is_long


def is_override(argument: str) -> bool:
    """Return whether an argument is `key=value`, or `~key`, which removes a key."""
    return not argument.startswith("-") and ("=" in argument or argument.startswith("~"))
