"""`auto` becomes the fastest schedule that fits, and stays whole where splitting gains little."""

import pytest

from frontier_lab.planning.search import Goal, search
from frontier_llm.cli.experiments import composed
from frontier_llm.config import decode
from frontier_llm.planner import choice
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.choice import LEAST_GAIN, choose_schedule
from frontier_llm.planner.estimate import budget_bytes
from frontier_llm.planner.memory import fullest
from frontier_llm.planner.space import orders
from frontier_llm.planner.step_time import step_time
from tests.values import tiny_values

AUTO = ("parallel.schedule=auto", "parallel.waiting_weights=auto")
LARGE = ("experiment=frontier_175b", "parallel.pipeline=16", *AUTO)


def _chosen(*overrides, ranks=1024):
    parallel = choose_schedule(composed(*overrides), ranks, 8).parallel
    return parallel.schedule, parallel.waiting_weights


def _seconds(schedule, waiting, *overrides):
    """Return the seconds of a step, and whether it fits."""
    given = (f"parallel.schedule={schedule}", f"parallel.waiting_weights={waiting}")
    candidate = Candidate.of(composed(*overrides, *given), 1024, 8)
    return step_time(candidate).seconds, fullest(candidate).total <= budget_bytes(candidate)


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.chunks=1"],
        ["parallel.chunks=2"],
        ["parallel.chunks=6"],
        ["parallel.chunks=2", "recompute=none"],
        ["parallel.chunks=1", "planner.memory_share=0.5"],
    ],
)
def test_the_choice_is_the_fastest_that_fits(overrides):
    config = composed(*LARGE, *overrides)
    chunks = config.parallel.chunks
    times = {order: _seconds(*order, *LARGE, *overrides) for order in orders(config, 16, chunks)}
    fitting = {order: seconds for order, (seconds, fits) in times.items() if fits}
    whole = ("interleaved" if chunks > 1 else "1f1b", 0)
    best = min(fitting, key=fitting.get)
    if fitting[best] > (1 - LEAST_GAIN) * fitting.get(whole, float("inf")):
        best = whole
    assert _chosen(*LARGE, *overrides) == best
    assert len(times) > 1


def test_splitting_pays_with_one_chunk_and_not_with_many():
    assert _chosen(*LARGE, "parallel.chunks=1")[1] > 0
    assert _chosen(*LARGE, "parallel.chunks=6") == ("interleaved", 0)


def test_a_small_gain_is_not_worth_splitting(monkeypatch):
    monkeypatch.setattr(choice, "LEAST_GAIN", 0.5)
    assert _chosen(*LARGE, "parallel.chunks=1") == ("1f1b", 0)


def test_less_memory_changes_the_choice():
    roomy = _chosen(*LARGE, "parallel.chunks=1", "planner.memory_share=1.0")
    tight = _chosen(*LARGE, "parallel.chunks=1", "planner.memory_share=0.43")
    assert roomy != tight


def test_given_values_stay():
    given = ("parallel.chunks=2", "parallel.schedule=zb_v")
    assert _chosen(*LARGE, *given)[0] == "zb_v"
    both = (*given, "parallel.waiting_weights=3")
    assert _chosen(*LARGE, *both) == ("zb_v", 3)
    assert _chosen(*LARGE, "parallel.chunks=2", "parallel.waiting_weights=0")[1] == 0


@pytest.mark.parametrize("key", ["sharding.fused_gradients=false", "kernels=compiled"])
def test_nothing_is_split_where_linear_layers_have_no_sink(key):
    assert _chosen(*LARGE, "parallel.chunks=1", key) == ("1f1b", 0)
    assert _chosen(*LARGE, "parallel.chunks=2", key) == ("interleaved", 0)


def test_without_a_pipeline_or_a_known_speed_nothing_is_split():
    tiny = decode(tiny_values("parallel.pipeline=1"))
    assert choose_schedule(tiny, 4, 4).parallel.schedule == "1f1b"
    values = tiny_values("cluster=dgx2_v100", "precision=bf16", "parallel.pipeline=2")
    values["cluster"]["device"]["calibration"]["products"].pop("bf16", None)
    values["cluster"]["device"]["peak_tflops"]["bf16"] = 1.0
    parallel = choose_schedule(decode(values), 4, 4).parallel
    assert (parallel.schedule, parallel.waiting_weights) == ("1f1b", 0)


def test_a_laptop_chooses_from_its_cluster_file():
    config = decode(tiny_values("parallel.pipeline=2", "data.global_batch=16"))
    chosen = choose_schedule(config, 4, 4)
    assert "auto" not in (chosen.parallel.schedule, chosen.parallel.waiting_weights)
    assert choose_schedule(config, 4, 4) == chosen == choose_schedule(chosen, 4, 4)


def test_the_search_beats_1f1b_for_175b_among_the_given_schedules():
    narrow = ("planner.tensor=[4]", "planner.pipeline=[16]", "planner.micro_batch=[1]",
              "planner.recompute=[full]", "planner.chunks=[1,2]", "planner.optimizer=[16]",
              "planner.rows=4")  # fmt: skip
    best = {}
    for schedules in ("null", "[1f1b]", "[zb_v,interleaved]"):
        found = search(composed(*LARGE, *narrow, f"planner.schedule={schedules}"), Goal(1024, 8))
        best[schedules] = found.best[0].time.seconds
        names = {layout.candidate.layout.schedule_name for layout in found.best}
        assert schedules == "null" or names <= set(schedules.strip("[]").split(","))
        for layout in found.best:
            parallel = layout.candidate.config.parallel
            assert parallel.schedule == layout.candidate.layout.schedule_name
    assert best["null"] <= best["[zb_v,interleaved]"] < 0.95 * best["[1f1b]"]
