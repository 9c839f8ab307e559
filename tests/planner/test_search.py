"""The search finds what trying everything finds, keeps to its constraints, says what it refused."""

import pytest

from frontier_lab.planning.cuts import cuts
from frontier_lab.planning.plan_json import layout_json
from frontier_lab.planning.search import Goal, fewest_nodes, scaling_curves, search
from frontier_llm.cli.experiments import composed
from frontier_llm.config import decode
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.partition import survives
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import budget_bytes
from frontier_llm.planner.memory import fullest
from frontier_llm.planner.space import legal_factors
from frontier_llm.planner.step_time import step_time
from frontier_llm.units import GIB
from tests.values import tiny_values

TINY = ["cluster=a100_80g", "precision=bf16", "data.global_batch=16", "planner.chunks=[1,2]"]


def _tiny(*overrides):
    return decode(tiny_values(*TINY, *overrides))


def _best_of_cuts(config, ranks):
    """Return the judged seconds and the memory of each cut with its best factors, best first."""
    best = {}
    for seconds, memory, cut in _everything(config, ranks):
        filled = memory / (config.cluster.device.memory_gib * GIB)
        judged = seconds * (1 + 0.1 * max(0.0, filled - 0.95) / 0.05)
        best[cut] = min(best.get(cut, (judged, memory)), (judged, memory))
    return sorted(best.values())


def _everything(config, ranks):
    """Judge every legal layout without any pruning."""
    estimated = []
    for cut in cuts(config, ranks, 8):
        try:
            base = Candidate.of(cut.apply(config), ranks, 8)
        except ConfigError:
            continue
        for factors in legal_factors(config, base.grid, base.factors):
            candidate = base.with_factors(factors)
            memory = fullest(candidate).total
            if memory <= budget_bytes(candidate):
                estimated.append((step_time(candidate).seconds, memory, str(cut)))
    return sorted(estimated)


@pytest.mark.parametrize("gib", [80, 2.74])
def test_the_best_are_those_that_trying_everything_finds(gib):
    """Also if many layouts nearly fill the device, so that they count as slower."""
    memory = f"cluster.device.memory_gib={gib}"
    config = _tiny("planner.rows=12", "planner.micro_batch=[1,2]", memory)
    found = search(config, Goal(8, 8))
    expected = _best_of_cuts(config, 8)[:12]
    assert sorted(found_row.judged_seconds for found_row in found.best) == pytest.approx(
        [judged for judged, _ in expected]
    )
    assert found.timed < len(_everything(config, 8))


def test_of_nearly_equal_layouts_the_roomiest_comes_first():
    narrow = ["planner.tensor=[2]", "planner.pipeline=[2,4]", "planner.micro_batch=[1,2]"]
    config = composed("experiment=frontier_22b", "planner.recompute=[none]", *narrow)
    found = search(config, Goal(16, 8)).best
    judged, peaks = zip(*((one.judged_seconds, one.peak.total) for one in found), strict=True)
    near = sum(seconds <= 1.01 * min(judged) for seconds in judged)
    assert near > 2
    assert list(peaks[:near]) == sorted(peaks[:near])
    assert list(judged[near:]) == sorted(judged[near:])
    assert max(judged[:near]) < judged[near]
    assert min(one.time.seconds for one in found) < max(one.time.seconds for one in found[:near])


@pytest.mark.parametrize("objective", ["throughput", "memory"])
def test_nothing_beats_the_front_and_it_lacks_nothing(objective):
    config = _tiny(f"planner.objective={objective}", "planner.rows=1", "planner.micro_batch=[1,2]")
    front = [(j.peak.total, j.time.seconds) for j in search(config, Goal(8, 8)).front]
    everything = sorted((memory, seconds) for seconds, memory, _ in _everything(config, 8))
    expected, fastest = [], float("inf")
    for memory, seconds in everything:
        if seconds < fastest:
            expected.append((memory, seconds))
            fastest = seconds
    assert len(expected) > 2
    assert front == [pytest.approx(point) for point in expected]


def test_the_front_has_the_split_schedules_that_trying_everything_finds():
    """Bounds exclude a schedule only if it is neither among the fastest nor in the front."""
    config = composed(
        "experiment=frontier_22b", "planner.tensor=[2]", "planner.pipeline=[8]",
        "planner.chunks=[1,2]", "planner.micro_batch=[1]", "planner.rows=1", "sharding=zero1",
    )  # fmt: skip
    front = search(config, Goal(64, 8)).front
    expected, fastest = [], float("inf")
    for seconds, memory, _ in sorted(_everything(config, 64), key=lambda found: found[1::-1]):
        if seconds < fastest:
            expected.append((memory, seconds))
            fastest = seconds
    assert [(j.peak.total, j.time.seconds) for j in front] == [pytest.approx(p) for p in expected]
    slow = [layout for layout in front if layout.time.seconds > front[-1].time.seconds]
    assert any(layout.candidate.layout.splits_backward for layout in slow)


def test_least_memory_is_the_least_of_all():
    config = _tiny("planner.objective=memory", "planner.rows=1", "planner.micro_batch=[1]")
    found = search(config, Goal(8, 8))
    assert found.best[0].peak.total == min(memory for _, memory, _ in _everything(config, 8))


def test_two_searches_agree():
    config = _tiny()
    first, second = search(config, Goal(8, 8)), search(config, Goal(8, 8))
    assert [*map(layout_json, first.best)] == [*map(layout_json, second.best)]
    assert first.refused == second.refused


def test_constraints_are_kept():
    config = _tiny(
        "planner.tensor=[2]", "planner.pipeline=[2]", "planner.recompute=[full]",
        "planner.optimizer=[2]",
    )  # fmt: skip
    for estimated in search(config, Goal(8, 8)).best:
        parallel = estimated.candidate.config.parallel
        assert (parallel.tensor, parallel.pipeline) == (2, 2)
        assert estimated.candidate.config.recompute == "full"
        assert estimated.candidate.factors.optimizer == 2


def test_what_is_found_fits_and_may_run():
    narrow = ["planner.tensor=[1,2]", "planner.pipeline=[4,8]", "planner.micro_batch=[1,2]"]
    config = composed("experiment=frontier_22b", "planner.rows=5", *narrow)
    for estimated in search(config, Goal(64, 8)).best:
        assert estimated.refused is None
        Candidate.of(estimated.candidate.config, 64, 8)
        assert estimated.candidate.grid.tensor <= 8


def test_refusals_are_counted_by_reason_with_an_example():
    narrow = ["planner.tensor=[2,4]", "planner.micro_batch=[1,3]", "planner.chunks=[1]"]
    found = search(composed("experiment=frontier_175b", *narrow), Goal(64, 8))
    assert any(reason.startswith("memory") for reason in found.refused)
    assert "data.global_batch" in found.refused
    assert set(found.examples) == set(found.refused)


def test_where_nothing_can_fit_the_memory_is_the_reason():
    """12 bytes of a trillion parameters on 8 devices of 64 GiB, whatever divides the batch."""
    found = search(composed("experiment=frontier_1t", "planner.chunks=[1]"), Goal(8, 8))
    assert found.best == []
    assert found.refused
    assert all(reason.startswith("memory") for reason in found.refused)


def test_where_a_smaller_batch_would_fit_the_batch_is_the_reason():
    found = search(_tiny("planner.micro_batch=[32]", "planner.tensor=[1]"), Goal(8, 8))
    assert found.best == []
    assert found.refused.most_common(1)[0][0] == "data.global_batch"


def test_the_fewest_nodes_that_reach_a_goal():
    config = composed(
        "experiment=amsp_llama_7b", "planner.nodes=[1,2,4,8]", "planner.tensor=[1]",
        "planner.pipeline=[1]", "planner.micro_batch=[1]", "planner.objective=nodes",
        "planner.goal_tokens_per_second=100000",
    )  # fmt: skip
    best = fewest_nodes([config], lambda *_: None).best[0]
    assert best.tokens_per_second >= 100_000
    fewer = best.candidate.grid.size // 2
    assert search(config, Goal(fewer, 8)).best[0].tokens_per_second < 100_000


@pytest.mark.parametrize(("nodes", "goal"), [("null", "1e6"), ("[1]", "null"), ("[1]", "1e12")])
def test_a_goal_that_cannot_be_reached_is_an_error(nodes, goal):
    config = composed(
        "experiment=amsp_llama_7b", f"planner.nodes={nodes}", "planner.tensor=[1]",
        "planner.pipeline=[1]", "planner.micro_batch=[1]", "planner.objective=nodes",
        f"planner.goal_tokens_per_second={goal}",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"planner\."):
        fewest_nodes([config], lambda *_: None)


def test_weak_scaling_grows_the_batch_and_strong_scaling_does_not():
    config = composed(
        "experiment=amsp_llama_7b", "planner.nodes=[1,4]", "planner.tensor=[1]",
        "planner.pipeline=[1]", "planner.micro_batch=[1]", "data.global_batch=64",
    )  # fmt: skip
    first, last = scaling_curves([config], lambda *_: None)
    assert first.strong_efficiency == first.weak_efficiency == 1
    assert last.strong.candidate.config.data.global_batch == 64
    assert last.weak.candidate.config.data.global_batch == 256
    assert 0.9 < last.strong_efficiency <= last.weak_efficiency


def test_a_batch_that_cannot_grow_in_whole_samples_is_refused():
    config = composed("experiment=amsp_llama_7b", "planner.nodes=[3,4]", "data.global_batch=64")
    with pytest.raises(ConfigError, match=r"planner\.nodes") as caught:
        scaling_curves([config], lambda *_: None)
    assert caught.value.got == 4


def test_only_layouts_that_survive_a_node_are_planned() -> None:
    config = _tiny("planner.survives=node", "planner.pipeline=[1]")
    found = search(config, Goal(16, 8))
    assert found.best
    for estimate in found.best:
        assert survives(estimate.candidate.grid, estimate.candidate.factors) == "node"
    nothing = search(config, Goal(8, 8))
    assert not nothing.best
    assert "survive the loss of a node" in nothing.examples["sharding"]


@pytest.mark.parametrize(
    ("shards", "allowed"),
    [
        ("none", {(1, 1, 1)}),
        ("optimizer", {(1, 1, 1), (1, 1, 2), (1, 1, 4)}),
        ("stages", {(1, 1, 1), (2, 2, 2), (4, 4, 4), (1, 1, 4), (1, 4, 4)}),
        ("fsdp", {(1, 1, 1), (2, 2, 2), (4, 4, 4), (1, 2, 2), (1, 4, 4)}),
    ],
)
def test_a_search_has_only_factors_that_the_program_can_use(shards, allowed):
    config = _tiny(f"planner.engine.shards={shards}")
    layout = Candidate.of(config, 4, 4).layout
    legal = legal_factors(config, layout.grid, layout.factors)
    assert {(f.params, f.grads, f.optimizer) for f in legal} == allowed
