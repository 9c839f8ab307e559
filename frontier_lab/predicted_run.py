"""What commands that predict a run assume of its machine and of its text, and tell the user."""

from collections.abc import Callable, Sequence

from frontier_llm.cli import machine_defaults
from frontier_llm.cli.compose import groups
from frontier_llm.cli.group_files import file_choices
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError, DataError


def assumed_cluster(config: RunConfig, overrides: Sequence[str]) -> tuple[str, str] | None:
    """Return which cluster follows from a machine without a GPU, and what to do; None: none does.

    Commands that predict would otherwise plan a large model for a laptop without saying so.
    """
    name, given = config.cluster.name, dict(word.partition("=")[::2] for word in overrides)
    experiment = given.get("experiment")
    of_experiment = file_choices("experiment", experiment) if experiment else {}
    if name != machine_defaults.WITHOUT_GPU or name in (
        given.get("cluster"),
        of_experiment.get("cluster"),
    ):
        return None
    names = [
        other for other in groups()["cluster"] if other not in machine_defaults.OF_THIS_MACHINE
    ]
    return f"{name}, because this machine has no GPU", f"add cluster=NAME: {', '.join(names)}"


def with_known_share(config: RunConfig, explain: Callable[[str], object]) -> RunConfig:
    """As `with_read_share`, if all corpora are prepared; explain what a prediction counts."""
    if config.data.documents != "separate" or config.data.read_share is not None:
        return config
    from frontier_llm.data.prepare import find_prepared  # imports NumPy
    from frontier_llm.data.read_share import with_read_share

    try:
        folders = [folder for _, folder in find_prepared(config.data)]
    except (ConfigError, DataError):  # a plan may be for text of another machine
        folders = [None]
    known = [folder for folder in folders if folder is not None]
    if len(known) < len(folders):
        explain(
            "data.documents=separate: attention is counted as if documents were joined, because "
            "the corpus is not prepared; set data.read_share, or run frontier-llm preprocess"
        )
        return config
    config = with_read_share(config, known)
    explain(
        f"data.documents=separate: attention reads {config.data.pairs_read:.1%} of the pairs of "
        "tokens of a sample, as in the prepared corpus"
    )
    return config
