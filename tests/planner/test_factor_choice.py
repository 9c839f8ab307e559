"""`auto` becomes the fastest factors that fit, for the run's own ranks, batch and formats."""

from itertools import product

import pytest

from frontier_lab.planning.search import Goal, search
from frontier_llm.cli.compose import groups
from frontier_llm.cli.experiments import composed
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.partition import Factors
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.choice import FREE_COST, FREE_SHARE, choose, choose_factors
from frontier_llm.planner.estimate import budget_bytes, estimate
from tests.covering import covering
from tests.values import tiny_values

LARGE = [name for name in groups()["experiment"] if name.startswith(("amsp_", "frontier_", "mt5_"))]
RANKS = (8, 64, 256, 1024)
CASES = list(product(LARGE, RANKS))
CHOSEN = [("amsp_llama_7b", 256), ("amsp_llama_30b", 1024), ("frontier_175b", 64), ("mt5_xl", 64)]
PRESETS = ("replicated", "zero1", "zero2", "zero3", "mics", "zeropp")


def _config(experiment, ranks, sharding="amsp"):
    """Compose an experiment for many ranks, and divide sequences as the search does."""
    config = composed(f"experiment={experiment}", f"sharding={sharding}")
    batch = config.data.micro_batch * max(1024, ranks)
    data = config.data.model_copy(update={"global_batch": batch})
    parallel = config.parallel.model_copy(update={"sequence": config.parallel.tensor > 1})
    # the search would try schedules that split backward passes also where the experiment has none
    engine = config.planner.engine.model_copy(update={"splits_backward": False})
    planner = config.planner.model_copy(update={"engine": engine})
    return config.model_copy(update={"data": data, "parallel": parallel, "planner": planner})


def _estimated(config, ranks):
    """Predict a configuration; None if it cannot run on these ranks."""
    try:
        return estimate(Candidate.of(choose(config, ranks, 8), ranks, 8))
    except ConfigError:
        return None


def _best_of_the_search(config, ranks):
    """Return the fastest step of a search over the factors of this cut."""
    parallel, data = config.parallel, config.data
    cut = {
        "tensor": (parallel.tensor,), "pipeline": (parallel.pipeline,),
        "chunks": (parallel.chunks,), "micro_batch": (data.micro_batch,),
        "recompute": (config.recompute,), "rows": 1,
    }  # fmt: skip
    planner = config.planner.model_copy(update=cut)
    found = search(config.model_copy(update={"planner": planner}), Goal(ranks, 8))
    return found.best[0].time.seconds if found.best else None


@pytest.mark.slow
@pytest.mark.parametrize("case", covering(CASES, set(CASES) - set(CHOSEN)), ids=str)
def test_the_choice_is_the_search_s_and_beats_every_preset(case):
    experiment, ranks = case
    config = _config(experiment, ranks)
    best = _best_of_the_search(config, ranks)
    found = {name: _estimated(_config(experiment, ranks, name), ranks) for name in PRESETS}
    chosen = _estimated(config, ranks)
    if best is None:
        assert chosen is None
        assert not any(preset and not preset.refused for preset in found.values())
        return
    assert chosen.time.seconds <= 1.02 * best
    for name, preset in found.items():
        if preset and not preset.refused:
            assert chosen.time.seconds <= (1 + FREE_COST) * preset.time.seconds, name


def test_memory_is_left_free_where_that_costs_little():
    config = _config("mt5_xl", 64)
    fastest = choose_factors(config, 64, 8)[1]
    share = fastest.peak.total / ((1 - FREE_SHARE / 2) * 80 * 2**30)
    planner = config.planner.model_copy(update={"memory_share": share})
    narrow = config.model_copy(update={"planner": planner})
    chosen, choice = choose_factors(narrow, 64, 8)
    budget = budget_bytes(Candidate.of(chosen, 64, 8))
    assert fastest.peak.total <= budget
    assert choice.peak.total <= (1 - FREE_SHARE) * budget
    assert fastest.seconds < choice.seconds <= (1 + FREE_COST) * fastest.seconds


def test_a_faster_next_best_is_explained_by_its_memory():
    config = _config("mt5_xl", 64)
    planner = config.planner.model_copy(update={"optimizer": (32, 64)})
    config = config.model_copy(update={"planner": planner})
    fastest = choose_factors(config, 64, 8)[1]
    share = fastest.peak.total / ((1 - FREE_SHARE / 2) * 80 * 2**30)
    planner = planner.model_copy(update={"memory_share": share, "params": (1,), "grads": (1,)})
    text = str(choose_factors(config.model_copy(update={"planner": planner}), 64, 8)[1])
    assert "per step, but less than 5% of the memory is free" in text


def test_a_choice_says_what_was_chosen_and_what_the_next_best_costs():
    text = str(choose_factors(_config("amsp_llama_7b", 64), 64, 8)[1])
    assert text.startswith("factors 1/1/64 (parameters/gradients/optimizer states), ")
    assert "per step predicted; 79 of 84 legal sets of factors fit in memory. Next best: " in text
    assert "ms more for " in text


def test_without_a_known_speed_the_smallest_factors_that_fit_are_chosen():
    def without_speed(config):
        device = config.cluster.device
        calibration = device.calibration.model_copy(update={"products": {}})
        device = device.model_copy(update={"calibration": calibration})
        cluster = config.cluster.model_copy(update={"device": device})
        return config.model_copy(update={"cluster": cluster})

    small, choice = choose_factors(without_speed(_config("amsp_llama_7b", 64)), 64, 8)
    sharding = small.sharding
    assert (sharding.params, sharding.grads, sharding.optimizer) == (1, 1, 8)
    assert "speed of the cluster is not known" in str(choice)


def test_what_is_given_stays():
    config = composed("experiment=amsp_llama_7b", "sharding=amsp_1_1_8")
    assert choose_factors(config, 1024, 8) == (config, None)
    restricted = _config("amsp_llama_7b", 64)
    planner = restricted.planner.model_copy(update={"optimizer": (8,)})
    chosen = choose(restricted.model_copy(update={"planner": planner}), 64, 8)
    found = Candidate.of(chosen, 64, 8).factors
    assert found == Factors(1, 1, 8, 64, divides_sums=True, borders=(8,))


def test_what_never_fits_says_how_much_it_needs():
    config = composed("experiment=amsp_llama_30b", "sharding=amsp", "data.global_batch=64")
    with pytest.raises(ConfigError, match=r"at least .* GiB on a rank") as error:
        choose_factors(config, 8, 8)
    assert error.value.key == "sharding"


@pytest.mark.parametrize("keys", [["sharding.params=1"], ["sharding.grads=1"]])
def test_auto_is_for_all_or_none(keys):
    config = composed("experiment=amsp_llama_7b", "sharding=amsp", *keys)
    with pytest.raises(ConfigError, match="use sharding=amsp"):
        Candidate.of(choose(config, 64, 8), 64, 8)


def test_the_factors_and_the_schedule_are_chosen_together():
    from frontier_llm.config import decode

    values = tiny_values("sharding=amsp", "parallel.pipeline=2", "data.global_batch=8")
    chosen = choose(decode(values), 4, 4)
    assert isinstance(chosen.sharding.optimizer, int)
    assert chosen.parallel.schedule != "auto"
