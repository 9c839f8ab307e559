"""Compare Bayesian with random search on a sweep whose trials the planner predicts.

`docs.generate.sweeps_page study` writes the results into docs/sweeps.md. Each setting of the space
is predicted once. The searches then read these predictions, so that many searches take seconds.
Optuna is imported by the functions that search, because its import takes more than a second.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import fmean, pvariance
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Transformer
from hydra.utils import instantiate
from omegaconf import OmegaConf

from frontier_llm.cli.compose import compose, groups
from frontier_llm.cli.package_files import CONF
from frontier_llm.cli.sweep import file_settings, is_axis
from frontier_llm.cli.sweep_report import Curve, best_so_far, convergence_table
from frontier_llm.cli.sweep_trials import Trial
from frontier_llm.cli.trial_runner import planned_trial
from frontier_llm.config import decode

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

Setting = tuple[Any, ...]
"""A value for each axis."""
SWEEP = "frontier_175b"
"""File of conf/sweep that is studied."""
BAYESIAN, RANDOM = "Bayesian", "random"
PAPER = (
    "data.micro_batch", "parallel.tensor", "parallel.pipeline", "launch.nodes", "sharding",
)  # fmt: skip
"""Ranking of arXiv:2312.12705, as recalled. The paper does not vary the number of micro-batches."""
NEAR = 0.99
"""Share of the best speed from which a search counts as successful."""
PAIRS = 6
"""Number of pairs in the tables."""


@dataclass(frozen=True)
class Space:
    """All settings of a sweep with their predicted trials."""

    axes: dict[str, list[Any]]
    trials: dict[Setting, Trial]

    @classmethod
    def of(cls, sweep: str, overrides: Sequence[str] = ()) -> "Space":
        """Predict all settings of a file of conf/sweep.

        Args:
            sweep: name of the file.
            overrides: overrides and axes that replace those of the file.
        """
        axes = axes_of([f"sweep={sweep}", *overrides])
        choices = [key for key in axes if key in groups()]
        fixed = [f"sweep={sweep}", *(text for text in overrides if not is_axis(text))]
        composed = {
            chosen: compose([*fixed, *_texts(choices, chosen)])
            for chosen in itertools.product(*(axes[key] for key in choices))
        }
        trials = {}
        for setting in itertools.product(*axes.values()):
            values = dict(zip(axes, setting, strict=True))
            base = deepcopy(composed[tuple(values[key] for key in choices)])
            for key in axes.keys() - set(choices):
                section, name = key.split(".")
                base[section][name] = values[key]
            trials[setting] = planned_trial(_texts(axes, setting), decode(base))
        return cls(axes, trials)

    @property
    def best(self) -> Trial:
        """The fastest trial of all."""
        return max(self.trials.values(), key=lambda trial: trial.speed)

    def search(self, sampler: "BaseSampler", count: int) -> list[Trial]:
        """Return the trials of one search, as hydra's sweeper makes them."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        found = []
        for _ in range(count):
            asked = study.ask()
            setting = tuple(asked.suggest_categorical(key, self.axes[key]) for key in self.axes)
            found.append(self.trials[setting])
            study.tell(asked, found[-1].value)
        return found

    def shares(self, size: int) -> dict[tuple[str, ...], float]:
        """Return the share of the variance of the speed that each set of `size` axes explains.

        For pairs it is the share beyond those of the two axes. All combinations of the values are
        there once, so this functional analysis of variance is exact.
        """
        total = pvariance(trial.speed for trial in self.trials.values())
        return {
            keys: self._beyond_parts(keys) / total
            for keys in itertools.combinations(self.axes, size)
        }

    def _beyond_parts(self, keys: tuple[str, ...]) -> float:
        parts = itertools.chain.from_iterable(
            itertools.combinations(keys, size) for size in range(1, len(keys))
        )
        return self._variance(keys) - sum(map(self._beyond_parts, parts))

    def _variance(self, keys: Sequence[str]) -> float:
        """Return the variance of the mean speeds of all combinations of values of some axes."""
        places = [list(self.axes).index(key) for key in keys]
        speeds = defaultdict(list)
        for setting, trial in self.trials.items():
            speeds[tuple(setting[place] for place in places)].append(trial.speed)
        return pvariance([fmean(group) for group in speeds.values()])


def axes_of(overrides: Sequence[str]) -> dict[str, list[Any]]:
    """Return the axes of a sweep with their values: those of its file and of the command line."""
    parsed = OverridesParser.create().parse_overrides(
        [text for text in (*file_settings(overrides), *overrides) if not text.startswith("hydra")]
    )
    return {
        override.get_key_element(): list(override.sweep_iterator(transformer=Transformer.encode))
        for override in parsed
        if override.is_choice_sweep()
    }


def searches(space: Space, seeds: int, count: int) -> dict[str, list[list[Trial]]]:
    """Return the trials of Bayesian and of random searches with the seeds 1, 2, ....

    Args:
        space: the space to search.
        seeds: number of searches of each kind.
        count: number of trials of each search.
    """
    from optuna.samplers import RandomSampler

    bayesian = OmegaConf.load(CONF / "hydra" / "sweeper" / "sampler" / "bayesian.yaml")
    numbers = range(1, seeds + 1)
    return {
        BAYESIAN: [space.search(instantiate(bayesian, seed=seed), count) for seed in numbers],
        RANDOM: [space.search(RandomSampler(seed=seed), count) for seed in numbers],
    }


def settings(trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    """Return the values of the axes of trials, whatever the order of their overrides."""
    given = ("sweep=", "launch.trial_runner=")
    return [
        tuple(sorted(text for text in trial.overrides if not text.startswith(given)))
        for trial in trials
    ]


def space_text(space: Space, found: Mapping[str, Sequence[Sequence[Trial]]]) -> list[str]:
    """Return sentences about the space, and about how many searches came near its best setting."""
    done = sum(trial.status == "done" for trial in space.trials.values())
    best = space.best
    near = [
        f"{sum(max(trial.speed for trial in one) >= NEAR * best.speed for one in each)} of "
        f"{len(each)} {name} searches"
        for name, each in found.items()
    ]
    return [
        f"The space has {len(space.trials):,} settings; {done:,} of them can run. The best has "
        f"{best.speed_number} {best.speed_unit}: `{' '.join(best.overrides)}`.",
        f"{' and '.join(near)} came within {1 - NEAR:.0%} of it.",
    ]


def curves(found: Mapping[str, Sequence[Sequence[Trial]]]) -> dict[str, list[Curve]]:
    """Return the best values so far of all searches."""
    return {name: [best_so_far(one) for one in each] for name, each in found.items()}


def block(
    space: Space,
    found: Mapping[str, Sequence[Sequence[Trial]]],
) -> list[str]:
    """Return the lines of the study: convergence, then the shares of axes and of pairs.

    Args:
        space: all settings.
        found: the searches, by the name of their kind.
    """
    return [
        "", *space_text(space, found), "", *convergence_table(curves(found)), "",
        "![best value so far](images/study_convergence.svg)", "",
        *_axes_table(space), "", _order_text(space), "", *_pairs_table(space), "",
    ]  # fmt: skip


def _axes_table(space: Space) -> list[str]:
    shares = _largest_first(space.shares(1))
    places = {axis: str(PAPER.index(axis) + 1) if axis in PAPER else "-" for (axis,) in shares}
    rows = [f"| {axis} | {share:.1%} | {places[axis]} |" for (axis,), share in shares.items()]
    return ["| axis | share of the variance | place in the paper |", "|---|---|---|", *rows]


def _order_text(space: Space) -> str:
    """Return a sentence that compares the exact order of the axes with that of the paper."""
    shares = {axis: share for (axis,), share in space.shares(1).items() if axis in PAPER}
    exact = sorted(shares, key=lambda axis: -shares[axis])
    return (
        "Of the axes that the paper has, the order by the share of the variance is "
        f"{', '.join(exact)}. The paper's order is {', '.join(PAPER)} (recalled)."
    )


def _pairs_table(space: Space) -> list[str]:
    shares = list(_largest_first(space.shares(2)).items())[:PAIRS]
    rows = [f"| {' x '.join(pair)} | {share:.1%} |" for pair, share in shares]
    return ["| pair | share of the variance |", "|---|---|", *rows]


def _largest_first(shares: Mapping[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _texts(keys: Sequence[str] | Mapping[str, Any], setting: Setting) -> list[str]:
    return [f"{key}={value}" for key, value in zip(keys, setting, strict=True)]
