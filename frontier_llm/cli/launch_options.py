"""Check the options of `frontier-llm launch`, most of which are those of sbatch or qsub."""

import difflib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from frontier_llm.cli.compose import groups
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

WITH_ASSIGNMENTS = {"-l": "", "-v": "", "-W": "", "--export": "="}
"""Options whose value has the form `name=value`, and what joins them to it."""
_SLURM_TIME = re.compile(
    r"(?P<m>\d+)(:(?P<s>\d+))?|(?P<h>\d+):(?P<m2>\d+):(?P<s2>\d+)"
    r"|(?P<d>\d+)-(?P<h2>\d+)(:(?P<m3>\d+)(:(?P<s3>\d+))?)?"
)
_PBS_TIME = re.compile(r"((?:(?P<h>\d+):)?(?P<m>\d+):)?(?P<s>\d+)(\.\d*)?")
_UNIT_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


@dataclass(frozen=True)
class TimeLimit:
    """The longest time that a job may take."""

    seconds: float
    """Infinite if there is no limit."""
    text: str
    """The option that sets it, and its file unless it is on the command line."""
    of_script: bool = False
    """Whether it is the default of the job script."""

    @classmethod
    def of_slurm(
        cls, options: Sequence[str], script: str, environ: Mapping[str, str] = os.environ
    ) -> "TimeLimit | None":
        """Return the limit of a job of Slurm; None if only the partition has one.

        Options of sbatch count more than its environment variables, and these more than the
        directives of the script.

        Raises:
            ConfigError: the value is in none of the formats that sbatch accepts.
        """
        places = [
            (_directives(script), f" of {script}"),
            ([f"--time={time}" for name, time in environ.items() if name == "SBATCH_TIMELIMIT"],
             " (SBATCH_TIMELIMIT)"),
            (options, ""),
        ]  # fmt: skip
        found = None
        for words, origin in places:
            for option, following in pairwise([*words, ""]):
                name, equals, value = option.partition("=")
                if option.startswith("-t"):
                    name, value, equals = "--time", option[2:], option[2:]
                if name == "--time":
                    value = value if equals else following
                    limit = slurm_seconds(value)
                    found = cls(limit, f"--time={value}{origin}", of_script=script in origin)
        return found

    @classmethod
    def of_pbs(cls, options: Sequence[str]) -> "TimeLimit | None":
        """Return the limit of a job of PBS; None if only the queue has one.

        Raises:
            ConfigError: the value is in none of the formats that qsub accepts.
        """
        of_resources = [option[2:].split(",") for option in options if option.startswith("-l")]
        values = [item for items in of_resources for item in items if item.startswith("walltime=")]
        if not values:
            return None
        match = _PBS_TIME.fullmatch(values[-1].removeprefix("walltime="))
        if match is None:
            raise ConfigError(
                "-l walltime", values[-1], "hours:minutes:seconds, or seconds",
                "write -l walltime=00:20:00 for twenty minutes",
            )  # fmt: skip
        return cls(_seconds(match), f"-l {values[-1]}")


def slurm_seconds(text: str) -> float:
    """Return a time of sbatch's option --time in seconds; infinity for no limit.

    Raises:
        ConfigError: the text is in none of the formats that the manual page of sbatch lists.
    """
    if text.upper() in ("0", "INFINITE", "UNLIMITED"):
        return math.inf
    match = _SLURM_TIME.fullmatch(text)
    if match is None:
        raise ConfigError(
            "--time", text or "nothing", "minutes, minutes:seconds, hours:minutes:seconds, "
            "days-hours, days-hours:minutes or days-hours:minutes:seconds",
            "write --time=06:00:00 for six hours",
        )  # fmt: skip
    return _seconds(match) or math.inf


def _seconds(match: re.Match[str]) -> float:
    return sum(_UNIT_SECONDS[name[0]] * int(n) for name, n in match.groupdict().items() if n)


def _directives(script: str) -> list[str]:
    """Return the options of the lines `#SBATCH` of a script."""
    lines = Path(script).read_text().splitlines()
    return [word for line in lines if line.startswith("#SBATCH ") for word in line.split()[1:]]


def check_qsub_options(options: Sequence[str]) -> None:
    """Refuse options that qsub does not have, or that mean something else to it than to sbatch.

    Raises:
        ConfigError: an option is one of Slurm.
    """
    for option, following in pairwise([*options, ""]):
        if not option.startswith("-") or option[1:].isdigit():
            continue
        is_long = option.startswith("--")
        name, _, joined = option.partition("=") if is_long else (option[:2], "", option[2:])
        value = joined or ("" if following.startswith("-") else following)
        # -N is the name of a job, which begins with no digit, and -p a priority
        other_meaning = {"-N": r"\d+", "-p": r".*[a-zA-Z].*"}.get(name)
        if name[1] in QSUB_LETTERS and not (other_meaning and re.fullmatch(other_meaning, value)):
            continue
        instead = IN_QSUB.get(name, "an option of qsub").format(value or "VALUE")
        raise ConfigError(
            "the command line", " ".join([option, value] if value and not joined else [option]),
            "options of qsub, because this cluster has PBS",
            f"write {instead}; a full set is -A PROJECT -q QUEUE -l walltime=00:20:00 "
            "-l filesystems=home:eagle",
        )  # fmt: skip


def with_joined_values(arguments: Sequence[str]) -> list[str]:
    """Join options and values that look like overrides, as in `-l walltime=00:20:00`.

    To sbatch `-v` and `-W` are options without a value. So a key of the configuration after them is
    an override.
    """
    known = {*groups(), *(key for key, _, _ in keys())}
    joined: list[str] = []
    for argument in arguments:
        before = joined[-1] if joined else ""
        is_value = not argument.startswith("-") and argument.partition("=")[0] not in known
        if before in WITH_ASSIGNMENTS and is_value:
            joined[-1] += WITH_ASSIGNMENTS[before] + argument
        else:
            joined.append(argument)
    return joined


def check_words(arguments: Sequence[str]) -> None:
    """Refuse mistyped options, and words that sbatch would take for the job script.

    Raises:
        ConfigError: a word is no override, no option and not the value of the preceding option, or
            it is almost an option of this command.
    """
    for word in arguments:
        _check_spelling(word)
    for before, word in pairwise(["", *arguments]):
        if word == "--chain":
            raise ConfigError(word, "no number", "--chain=N", "write --chain=8 for eight jobs")
        if word == "--scaling":
            raise ConfigError(
                word, "no curve", "--scaling=weak or --scaling=strong", "write --scaling=strong"
            )
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
        raise ConfigError(
            "the command line",
            word,
            f"one of {', '.join(OWN_OPTIONS)}, or an option of sbatch",
            todo,
        )


def _takes_value(option: str) -> bool:
    """Return whether an option takes the next word as `-A` and `--account` do, unlike `-N2`."""
    is_short = len(option) == len("-A") and option.startswith("-")
    is_long = option.startswith("--") and "=" not in option and option != "--submit"
    return is_short or is_long


def is_override(argument: str) -> bool:
    """Return whether an argument is `key=value`, or `~key`, which removes a key."""
    return not argument.startswith("-") and ("=" in argument or argument.startswith("~"))
