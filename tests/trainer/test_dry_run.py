"""Every stage is built as it was planned, at the full world size, without memory."""

import pytest

from frontier_lab.commands.dry_run import candidate_of
from frontier_llm.cli import train
from frontier_llm.cli.compose import compose
from frontier_llm.cli.dry_run import build
from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.planner import memory
from frontier_llm.trainer import dry_run
from frontier_llm.trainer.dry_run import DryRunError, check_parameter_count
from tests.ranks import run_ranks
from tests.values import tiny_values


def in_a_process(world, experiment, every):
    """Build an experiment in a process of its own: megatron's names are replaced there."""
    import torch.distributed as dist

    dist.destroy_process_group()
    candidate = candidate_of(*experiment)
    built = build(candidate, every=every)
    if every:
        expected = count_parameters(candidate.config.model, candidate.config.data.sequence_length)
        assert sum(stage.counted for stage in built) == expected
    return len(built)


@pytest.mark.parametrize(
    ("experiment", "every", "stages"),
    [
        (["laptop_3d"], True, 2),
        (["frontier_22b"], True, 8),
        (["mt5_base", "sharding=zero3"], True, 1),
    ],
)
def test_an_experiment_is_built_as_planned(experiment, every, stages):
    assert run_ranks(in_a_process, 1, experiment, every) == [stages]


def fails(world, what):
    import torch.distributed as dist

    dist.destroy_process_group()
    candidate = candidate_of("laptop_3d")
    if what == "bytes":
        dry_run.rank_state_bytes = lambda *_, **__: dict.fromkeys(memory.STATES, 1)
    elif what == "names":
        dry_run.chunk_parameters = lambda *_: iter(())
    try:
        built = build(candidate, every=False)
        if what == "count":
            check_parameter_count(candidate, built[:1])
    except DryRunError as error:
        return str(error)
    return "built"


@pytest.mark.parametrize(
    ("what", "words"), [("bytes", "bytes of"), ("names", "inventory"), ("count", "count")]
)
def test_what_differs_from_the_plan_is_an_error(what, words):
    (message,) = run_ranks(fails, 1, what)
    assert words in message


def through_the_door(world, run_dir):
    import torch.distributed as dist

    dist.destroy_process_group()
    return train.main(
        ["experiment=frontier_22b", "plan=dry_run", "planner.nodes=2", f"run.dir={run_dir}"]
    )


def test_train_builds_without_training_or_a_run_directory(tmp_path):
    assert run_ranks(through_the_door, 1, tmp_path / "run") == [0]
    assert not (tmp_path / "run").exists()


def test_values_of_a_plan_are_part_of_the_configuration():
    assert compose(["plan=off"])["plan"] == "off"
    assert tiny_values()["plan"] == "check"
