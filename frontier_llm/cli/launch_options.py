"""Check the options of `frontier-llm launch`, most of which are those of sbatch or qsub."""

import difflib
import re
from collections.abc import Sequence
from itertools import pairwise

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


def with_joined_resources(arguments: Sequence[str]) -> list[str]:
    """Join `-l` and its value, which looks like an override: `-l walltime=00:20:00`."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] == "-l" and not argument.startswith("-"):
            joined[-1] += argument
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
