"""Build the pipeline stages of a run without memory (`plan=dry_run`).

The model is built on torch's meta device, which allocates no memory. Parameters and memory of every
stage are compared with the prediction of the planner.
"""

from typing import TYPE_CHECKING

from frontier_llm.cli.console import DelayedProgress, plain_table, wide_console
from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.planner.candidate import Candidate
from frontier_llm.trainer.learning_rate import LearningRate
from frontier_llm.units import format_bytes, format_count

if TYPE_CHECKING:
    from frontier_llm.trainer.dry_run import BuiltStage


def build(candidate: Candidate, *, every: bool) -> "list[BuiltStage]":
    """Build the first stage of each kind (stages of a kind are equal), or every stage.

    Raises a DryRunError if a stage differs from the prediction.
    """
    # imports torch, which a mistyped name should not wait for
    from frontier_llm.trainer.dry_run import check_parameter_count, dry_run

    first_of_kinds = [kind.first for kind in candidate.stages.kinds]
    stages = list(range(candidate.grid.pipeline)) if every else first_of_kinds
    with DelayedProgress(wide_console(stderr=True)) as progress:
        built = dry_run(candidate, stages, lambda share: progress("stages", share))
    if every:
        check_parameter_count(candidate, built)
    return built


def print_stages(candidate: Candidate) -> None:
    """Build every stage of a run, and print its parameters and memory."""
    built = build(candidate, every=True)
    config = candidate.config
    count = count_parameters(config.model, config.data.sequence_length)
    title = (
        f"{config.model.name}, {format_count(count)} parameters: {candidate.description}, "
        "every stage as planned"
    )
    columns = ("stage", "parameters per rank", "model states", "planned peak")
    table = plain_table(title, columns)
    for stage in built:
        table.add_row(
            str(stage.stage),
            format_count(stage.parameters),
            format_bytes(sum(stage.state_bytes.values())),
            format_bytes(stage.peak_bytes),
        )
    wide_console().print(table)
    rates = LearningRate.of(config).describe(config.trainer.steps)
    wide_console().print(f"learning rate, {rates}")
    wide_console().print(
        "not checked: the text of data.path, which `frontier-llm launch` looks for"
    )
