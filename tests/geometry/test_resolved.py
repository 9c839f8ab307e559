"""A configuration resolved to integers."""

from dataclasses import replace

import pytest

from frontier_lab.planning.unit_gathers import count_gathers
from frontier_llm.cli.compose import compose
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.communicators import tied_stages
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.resolved import ResolvedLayout

BATCH = ("data.global_batch=64", "data.micro_batch=1")


def test_a_layout_holds_the_integers_of_its_configuration() -> None:
    overrides = ("parallel.tensor=2", "parallel.pipeline=4", "parallel.chunks=2", "precision=auto")
    config = RunConfig.model_validate(
        compose(["model=gpt_125m", "sharding=zero1", *overrides, *BATCH])
    )
    layout = ResolvedLayout.resolve(config, 32, 8)
    assert layout.grid == Grid(tensor=2, data=4, pipeline=4, ranks_per_node=8)
    assert layout.factors == Factors(1, 1, 4, 4)
    assert (layout.micro_batches, layout.compute_bytes, layout.nodes_per_copy) == (16, 2, 4)
    assert [chunk.stage for chunk in layout.model_chunks] == [0, 1, 2, 3] * 2
    measured = ResolvedLayout.resolve(config, 32, 8, precision="fp32", ignore_sharding=True)
    assert (measured.compute_bytes, measured.factors) == (4, Factors(1, 1, 1, 4))
    assert measured.with_factors(layout.factors).factors == layout.factors


def test_a_layout_that_breaks_a_rule_is_refused_if_checked() -> None:
    config = RunConfig.model_validate(compose(["model=gpt_125m", "data.global_batch=7"]))
    with pytest.raises(ConfigError, match="global_batch"):
        ResolvedLayout.resolve(config, 8, 8)
    assert ResolvedLayout.resolve(config, 8, 8, check_rules=False).grid.size == 8


def _pipelined(schedule: str) -> ResolvedLayout:
    values = compose(
        [
            "model=gpt_tiny",
            "model.layers=8",
            "parallel.pipeline=4",
            "parallel.chunks=2",
            f"parallel.schedule={schedule}",
            *BATCH,
        ]
    )
    return ResolvedLayout.resolve(RunConfig.model_validate(values), 8, 8)


def test_in_v_placement_the_first_stage_has_the_tied_table_once() -> None:
    loop, folded = _pipelined("interleaved"), _pipelined("zb_v")
    assert (loop.head_stage, folded.head_stage) == (3, 0)
    table = loop.unit_sizes(0)["embedding"]
    assert table == loop.unit_sizes(3)["embedding"]
    assert folded.unit_sizes(0)["embedding"] == table
    assert [stage for stage in range(4) if "embedding" in folded.unit_sizes(stage)] == [0]
    assert tied_stages(loop) == {(0, 3)}
    assert not tied_stages(folded)


def test_chunks_of_one_stage_send_each_other_nothing() -> None:
    for schedule, borders in (("interleaved", 7), ("zb_v", 6)):
        layout = _pipelined(schedule)
        traffic, grid = layout.activation_traffic, layout.grid
        sent = [
            traffic.pipeline_sent(grid, rank, layout.model_chunks)
            for rank in grid.pipeline_group(0)
        ]
        total = sum(each.total for each in sent)
        assert total == 2 * borders * layout.boundary_bytes


def test_auto_interleaves_chunks_and_lets_no_gradients_wait() -> None:
    layout = _pipelined("auto")
    assert (layout.schedule_name, layout.waiting_weights) == ("interleaved", 0)
    assert layout.schedule == _pipelined("interleaved").schedule
    kinds = {action.kind for actions in layout.schedule.actions for action in actions}
    assert kinds == {"forward", "backward"}


def test_weight_gradients_gather_nothing() -> None:
    """Of the passes in the same order, split or not."""
    whole = _pipelined("interleaved")
    split = replace(whole, waiting_weights=1)
    assert split.schedule != whole.schedule
    assert all(count_gathers(split, stage) == count_gathers(whole, stage) for stage in range(4))
