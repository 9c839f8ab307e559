"""Write the table of docs/checkpoint.md for DataStates-LLM's models: bytes and predicted waits.

`python -m docs.generate.checkpoint_page` reports whether the table is out of date, and `--write`
writes it.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from docs.generate.marked_page import filled, keep_current
from docs.generate.models_and_clusters_page import composed
from docs.generate.scoreboard_page import DATASTATES_GB
from frontier_llm.cli.experiments import Header
from frontier_llm.cli.options import run_command
from frontier_llm.cli.package_files import CONF
from frontier_llm.geometry.host_pool import STATE_BYTES
from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import estimate

PAGE = CONF.parent / "docs" / "checkpoint.md"
HEAD = (
    "model", "nodes", "published, GB", "ours, GB", "step without saves, s",
    "wait per step, `blocking`, s", "`lazy`, s", "time, `blocking` over `lazy`",
    "steps that hide a write", "the same ratio at this interval",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table, or report whether it is out of date; return the exit code."""
    return keep_current(__doc__, "docs.generate.checkpoint_page", arguments, files)


def files() -> dict[Path, str]:
    """Return the page with its table."""
    return {PAGE: filled(PAGE.read_text(), {"datastates": table()})}


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| " + " | ".join(HEAD) + " |"
    yield "|" + "---|" * len(HEAD)
    for model, published in DATASTATES_GB.items():
        yield "| " + " | ".join(row(model, published)) + " |"


def row(model: str, published: int) -> tuple[str, ...]:
    """Return the cells of a model.

    Args:
        model: the model's size as in the name of its experiment.
        published: bytes of a checkpoint in the paper, in GB.
    """
    name = f"datastates_{model}"
    config = composed(f"experiment={name}")
    nodes = Header.read(CONF / "experiment" / f"{name}.yaml").ranks // config.cluster.ranks_per_node
    parameters = count_parameters(config.model, config.data.sequence_length)
    plain, _ = seconds(name, "off", 1)
    blocking, write = seconds(name, "blocking", 1)
    lazy, rest = seconds(name, "lazy", 1)
    every = max(1, math.ceil(write / plain))
    hidden = seconds(name, "blocking", every)[0] / seconds(name, "lazy", every)[0]
    return (
        model.upper(), str(nodes), str(published), f"{STATE_BYTES * parameters / 1e9:.0f}",
        f"{plain:.1f}", f"{write:.1f}", f"{rest:.1f}", f"{blocking / lazy:.2f}",
        str(every), f"{hidden:.2f}",
    )  # fmt: skip


def seconds(experiment: str, mode: str, every: int) -> tuple[float, float]:
    """Predict the seconds of a step, and those of them in which it waits for checkpoints.

    Args:
        experiment: name of the experiment.
        mode: value of the key `checkpoint`.
        every: steps from one checkpoint to the next.
    """
    keys = (f"checkpoint={mode}", f"checkpoint.every_steps={every}")
    config = composed(f"experiment={experiment}", *keys)
    ranks = Header.read(CONF / "experiment" / f"{experiment}.yaml").ranks
    time = estimate(Candidate.of(config, ranks, config.cluster.ranks_per_node)).time
    return time.seconds, time.parts["checkpoint"]


if __name__ == "__main__":
    sys.exit(run_command(main))
