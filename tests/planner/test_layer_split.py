"""Layers are divided so that the most expensive stage costs the least."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_lab.planning.plan_json import layout_json
from frontier_lab.planning.search import Goal, search
from frontier_llm.cli.experiments import composed
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.lengths import SampleLengths
from frontier_llm.geometry.model_chunks import split_layers
from frontier_llm.geometry.pipeline_schedule import Placement
from frontier_llm.planner import choice, layer_split
from frontier_llm.planner.candidate import Candidate, ranks_to_plan
from frontier_llm.planner.choice import choose
from frontier_llm.planner.estimate import estimate
from frontier_llm.planner.layer_split import LEAST_GAIN, cheapest_split, chunk_cost, stage_costs
from frontier_llm.planner.layout_time import LayoutTime
from frontier_llm.planner.memory import fullest
from tests.planner.layouts import make
from tests.values import SIDES, TINY_T5

XL = ("experiment=mt5_xl", "parallel.pipeline=4")
seconds = st.floats(0.25, 4.0)


def _of_costs(layers, embedding, head):
    def cost(first, end):
        return sum(layers[first:end]) + embedding * (first == 0) + head * (end == len(layers))

    return cost


def _all_splits(layers, chunks):
    for ends in combinations(range(1, layers), chunks - 1):
        yield tuple(b - a for a, b in zip((0, *ends), (*ends, layers), strict=True))


@given(st.lists(seconds, min_size=2, max_size=9), seconds, seconds, st.integers(2, 5))
def test_the_split_equals_the_best_of_all_splits(layers, embedding, head, stages):
    stages = min(stages, len(layers))
    cost, placement = _of_costs(layers, embedding, head), Placement(stages, 1)
    costs = {
        split: stage_costs(cost, placement, split) for split in _all_splits(len(layers), stages)
    }
    even = max(costs[split_layers(len(layers), stages)])
    least = min(map(max, costs.values()))
    found = cheapest_split(cost, len(layers), placement)
    if found is None:
        assert least > (1 - LEAST_GAIN) * even * (1 - 1e-6)
        return
    assert max(costs[found]) == pytest.approx(least)
    squares = [sum(x * x for x in c) for c in costs.values() if max(c) <= least * (1 + 1e-9)]
    assert sum(x * x for x in costs[found]) == pytest.approx(min(squares))


@given(
    st.lists(seconds, min_size=4, max_size=9), seconds, seconds, st.booleans(),
)  # fmt: skip
def test_no_move_off_the_costliest_stage_helps_two_chunks(layers, embedding, head, folded):
    cost, placement = _of_costs(layers, embedding, head), Placement(2, 2, folded)
    even = split_layers(len(layers), 4)
    found = cheapest_split(cost, len(layers), placement) or even
    most = max(stage_costs(cost, placement, found))
    assert sum(found) == len(layers)
    assert min(found) >= 1
    assert most <= max(stage_costs(cost, placement, even))
    least = min(max(stage_costs(cost, placement, s)) for s in _all_splits(len(layers), 4))
    assert most >= least * (1 - 1e-9)
    if found != even:
        moved = layer_split._moves(placement, found, _costliest(cost, placement, found))
        assert all(max(stage_costs(cost, placement, s)) >= most * (1 - 1e-6) for s in moved)


def _costliest(cost, placement, split):
    of_stages = stage_costs(cost, placement, split)
    return of_stages.index(max(of_stages))


def _estimated(config):
    return estimate(Candidate.of(config, *ranks_to_plan(config)))


def _chosen(*overrides):
    config = composed(*overrides)
    return choose(config, *ranks_to_plan(config))


def test_an_encoder_decoder_gets_stages_of_equal_seconds():
    even, chosen = (
        _chosen(*XL, f"parallel.layers_per_stage={split}") for split in ("null", "auto")
    )
    assert even.parallel.layers_per_stage is None
    split = chosen.parallel.layers_per_stage
    times = {layers: _seconds(chosen, layers) for layers in _neighbours(split)}
    assert _estimated(chosen).time.seconds == min(times.values())
    assert _estimated(chosen).time.seconds < 0.82 * _estimated(even).time.seconds


def _costs(*overrides):
    candidate = make(
        *overrides, "model.vocabulary=1048576", "model.layers=8", "parallel.pipeline=4", ranks=4
    )  # fmt: skip
    cost = chunk_cost(candidate.layout, LayoutTime(candidate))
    return candidate, [cost(layer, layer + 1) for layer in range(8)]


def test_the_first_decoder_layer_costs_its_embedding():
    _, shared = _costs(*TINY_T5)
    assert shared[4] == pytest.approx(shared[5])
    assert shared[0] > 1.001 * shared[1]
    _, own = _costs(*TINY_T5, "model.encoder_embedding=true")
    assert own[4] > 1.001 * own[5]
    assert own[5] == pytest.approx(own[6])
    assert own[0] > 1.001 * own[1]


def test_stages_of_the_decoder_add_up_its_tied_table():
    candidate, _ = _costs(*SIDES, "parallel.layers_per_stage=[2,1,3,2]")
    rates = LayoutTime(candidate).rates
    seconds = [
        rates.state_costs(candidate, kind).tied.seconds for kind in candidate.stages.by_stage
    ]
    assert seconds[:2] == [0.0, 0.0]
    assert seconds[2] == seconds[3] > 0.0


def _flops(encoder, decoder):
    """Return the operations of T5Gemma 9B-2B's layers and head, per sample with these tokens.

    All pairs of tokens count in layers without a window of 4096 tokens, and about all with it.
    """
    of_encoder = 2 * encoder * 3584 * (2 * 4096 + 2 * 2048 + 3 * 14336) + 4 * 4096 * encoder**2
    of_decoder = 2 * decoder * 2304 * (2 * 2048 + 2 * 1024 + 3 * 9216) + 2 * 2048 * decoder**2
    cross = 2 * decoder * 2304 * 2 * 2048 + 2 * encoder * 3584 * 2 * 1024
    cross += 4 * 2048 * encoder * decoder
    return [of_encoder] * 42 + [of_decoder + cross] * 26, 2 * decoder * 2304 * 256_000


@pytest.mark.parametrize(
    ("share", "decoder", "stages", "limit"),
    [(0.4999, 4096, 4, 1.05), (0.4999, 4096, 8, 1.11), (0.1109, 512, 4, 1.08),
     (0.1109, 512, 8, 1.08)],
)  # fmt: skip
def test_stages_of_unequal_sides_are_about_even(share, decoder, stages, limit):
    """The stages have equal seconds, with which their operations are equal up to a layer."""
    keys = (
        "model=t5gemma_9b_2b", "data=stdlib_spans", "data.sequence_length=4096",
        f"data.denoisers=[{{rate: {share}, span: null}}]", f"parallel.pipeline={stages}",
        "cluster=a100_80g", f"launch.nodes={stages}", "launch.ranks_per_node=8",
        f"data.global_batch={64 * stages}", "data.micro_batch=1", "sharding=zero1",
        "recompute=full", "parallel.schedule=1f1b",
    )  # fmt: skip
    even, chosen = (_chosen(*keys, f"parallel.layers_per_stage={s}") for s in ("null", "auto"))
    assert _estimated(chosen).candidate.layout.lengths == SampleLengths(4096, decoder)
    layers, head = _flops(4096, decoder)
    of_stages, first = [], 0
    for size in chosen.parallel.layers_per_stage:
        of_stages.append(sum(layers[first : first + size]))
        first += size
    of_stages[-1] += head
    assert max(of_stages) * stages / sum(of_stages) < limit
    assert _estimated(chosen).time.seconds < 0.92 * _estimated(even).time.seconds


@pytest.mark.parametrize("schedule", ["interleaved", "zb_v"])
def test_two_chunks_of_a_stage_are_balanced_together(schedule):
    two = (*XL, "parallel.chunks=2", f"parallel.schedule={schedule}")
    even, chosen = (_chosen(*two, f"parallel.layers_per_stage={s}") for s in ("null", "auto"))
    assert len(chosen.parallel.layers_per_stage) == 8
    assert _estimated(chosen).time.seconds < 0.93 * _estimated(even).time.seconds


def test_layers_do_not_hide_that_nothing_fits():
    with pytest.raises(ConfigError, match="sharding"):
        _chosen(*XL, "sharding=amsp", "planner.memory_share=0.02")


def _neighbours(split):
    for giver in range(len(split)):
        for taker in range(len(split)):
            moved = list(split)
            moved[giver] -= 1
            moved[taker] += 1
            yield tuple(moved)


def _seconds(config, layers):
    parallel = config.parallel.model_copy(update={"layers_per_stage": layers})
    return _estimated(config.model_copy(update={"parallel": parallel})).time.seconds


def test_predicted_chunks_cost_what_the_layout_says():
    """The costs of whole chunks equal the passes of the planner, up to the join with the CPU."""
    config = _chosen(*XL)
    candidate = Candidate.of(config, *ranks_to_plan(config))
    time = LayoutTime(candidate)
    cost = chunk_cost(candidate.layout, time)
    for chunk, passes in zip(candidate.layout.model_chunks, time.passes, strict=True):
        (elements,) = (sum(size * count for size, count in passes.kind.units),)
        found = cost(chunk.layers.start, chunk.layers.stop)
        whole = passes.seconds - passes.exchange.seconds + time.accumulation_seconds(elements)
        assert found == pytest.approx(whole - time.host.micro_batch_seconds, rel=0.01)


@pytest.mark.parametrize("name", ["frontier_22b", "frontier_175b", "frontier_1t", "datastates_13b"])
def test_large_gpts_keep_their_even_stages(name):
    config = composed(f"experiment={name}")
    ranks = {"frontier_22b": 16, "frontier_175b": 1024, "frontier_1t": 3072, "datastates_13b": 16}
    chosen = choose(config, ranks[name], config.cluster.ranks_per_node)
    assert chosen.parallel.layers_per_stage is None


def test_a_large_vocabulary_gets_fewer_layers_on_the_last_stage():
    chosen = _chosen("experiment=frontier_22b", "model.vocabulary=256000", "data.vocabulary=256000")
    split = chosen.parallel.layers_per_stage
    assert split[-1] == min(split) < 6
    assert sum(split) == 48


def test_a_split_that_does_not_fit_is_not_chosen():
    even = Candidate.of(_chosen(*XL, "parallel.layers_per_stage=null"), 16, 4)
    balanced = Candidate.of(_chosen(*XL), 16, 4)
    peaks = [fullest(candidate).total for candidate in (even, balanced)]
    assert peaks[0] < peaks[1]
    between = sum(peaks) / 2 / even.config.cluster.device.memory_gib / 2**30
    assert _chosen(*XL, f"planner.memory_share={between}").parallel.layers_per_stage is None


def test_a_split_that_alone_fits_is_chosen():
    """The stage with the head holds more, so fewer layers there also save memory."""
    large = ("experiment=frontier_1_4b", "planner.nodes=[1]", "parallel.schedule=zb_h1",
             "parallel.waiting_weights=0")  # fmt: skip
    even, other = (_estimated(_chosen(*large, f"parallel.layers_per_stage={s}"))
                   for s in ("null", "[13,11]"))  # fmt: skip
    assert other.peak.total < even.peak.total
    assert 0.9 * even.time.seconds < other.time.seconds < even.time.seconds
    assert _chosen(*large).parallel.layers_per_stage is None, "a small gain for equal layers"
    between = (even.peak.total + other.peak.total) / 2
    share = between / composed(*large).cluster.device.memory_gib / 2**30
    chosen = _chosen(*large, f"planner.memory_share={share}")
    assert chosen.parallel.layers_per_stage == (13, 11)


def test_a_small_gain_is_not_worth_uneven_stages(monkeypatch):
    monkeypatch.setattr(choice, "LEAST_GAIN", 0.5)
    assert _chosen(*XL).parallel.layers_per_stage is None


def test_one_stage_and_an_unknown_speed_have_no_split():
    assert _chosen(XL[0]).parallel.layers_per_stage is None
    assert _chosen(*XL, "cluster=other_gpu").parallel.layers_per_stage is None


def test_a_search_prints_the_balanced_layers_it_prefers():
    narrow = ("planner.tensor=[1]", "planner.pipeline=[4]", "planner.chunks=[1]",
              "planner.micro_batch=[4]", "planner.recompute=[full]", "planner.rows=9",
              "planner.schedule=[1f1b]")  # fmt: skip
    found = search(composed(*XL, *narrow), Goal(16, 4)).best
    splits = [layout.candidate.config.parallel.layers_per_stage for layout in found]
    assert splits[0] is not None
    assert None in splits
    assert layout_json(found[0])["layout"]["layers_per_stage"] == splits[0]
