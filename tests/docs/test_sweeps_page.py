"""The examples of the page about sweeps: commands that a reader can copy."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate import sweep_study
from docs.generate.sweeps_page import EXAMPLES, STUDY, block
from frontier_llm.cli.group_files import file_values
from frontier_llm.cli.sweep import file_settings, first_configuration
from frontier_llm.cli.sweep_trials import Trial, read_in_order


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_command_on_the_page_is_the_one_that_ran(example):
    points = [Trial(["data.micro_batch=1"], "done", "", 9.0, 1200.0, 2**30, 4.0, 4.0)]
    lines = block(example, points)
    command = "\n".join(lines[lines.index("```bash") + 1 : lines.index("```")])
    assert max(map(len, command.splitlines())) <= 90
    words = shlex.split(command.replace("\\\n", ""))
    assert words == ["python", "train.py", "-m", *EXAMPLES[example]]
    assert any(line.startswith("| 1.20k") and line.endswith("| done |") for line in lines)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_a_configuration(example):
    arguments = EXAMPLES[example]
    config = first_configuration([*file_settings(arguments), *arguments])
    assert config.data.sequence_length == 64
    assert config.model.hidden == 64


ROOT = Path(__file__).parents[2]
FEW = {
    "launch.nodes": [16, 64], "parallel.tensor": [2, 4], "parallel.pipeline": [8],
    "data.micro_batch": [1, 8], "launch.trial_micro_batches": [16], "sharding": ["zero1", "zero2"],
}  # fmt: skip
SMALL_STUDY = [f"{key}=choice({','.join(map(str, values))})" for key, values in FEW.items()]


@pytest.fixture(scope="module")
def space():
    return sweep_study.Space.of(sweep_study.SWEEP, SMALL_STUDY)


@pytest.mark.exhaustive
def test_the_searches_of_the_study_are_those_of_the_command(space, tmp_path):
    command = [
        sys.executable, "-m", "frontier_llm", "sweep", *STUDY, *SMALL_STUDY,
        "hydra.sweeper.n_trials=35", f"hydra.sweep.dir={tmp_path}",
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    trials = read_in_order(tmp_path)
    assert len(trials) == 35
    bayesian, random = sweep_study.searches(space, 2, 35).values()
    assert sweep_study.settings(bayesian[0]) == sweep_study.settings(trials)
    assert [trial.value for trial in bayesian[0]] == [trial.value for trial in trials]
    assert sweep_study.settings(random[0]) != sweep_study.settings(random[1])


def test_the_study_predicts_every_setting_once(space):
    assert space.axes == FEW
    assert len(space.trials) == 16
    assert space.best.speed == max(trial.speed for trial in space.trials.values()) > 0


def test_shares_of_the_variance_add_up_to_all_of_it(space):
    alone = space.shares(1)
    assert max(alone, key=alone.get) == ("data.micro_batch",)
    sizes = range(1, len(space.axes) + 1)
    assert sum(sum(space.shares(size).values()) for size in sizes) == pytest.approx(1)


def test_the_study_has_each_axis_with_its_place_in_the_paper(space):
    searches = sweep_study.searches(space, 2, 12)
    text = "\n".join(sweep_study.block(space, searches))
    assert "The space has 16 settings" in text
    lines = text.splitlines()
    assert next(line for line in lines if line.startswith("| sharding")).endswith("| 5 |")
    assert next(line for line in lines if line.startswith("| data.micro_batch |")).endswith("| 1 |")
    share = space.shares(2)["data.micro_batch", "sharding"]
    assert f"| data.micro_batch x sharding | {share:.1%} |" in lines
    assert any(line.startswith("| 12 |") for line in lines)


def test_the_page_has_the_study_of_the_present_file():
    page = (ROOT / "docs" / "sweeps.md").read_text()
    of_study = page.partition("<!-- study -->")[2].partition("<!-- end of study -->")[0]
    sweeper = file_values("sweep", sweep_study.SWEEP)["hydra"]["sweeper"]
    assert f"| {sweeper['n_trials']} |" in of_study
    for axis in sweeper["params"]:
        assert f"| {axis} |" in of_study
    settings = 1
    for values in sweep_study.axes_of([f"sweep={sweep_study.SWEEP}"]).values():
        settings *= len(values)
    assert f"The space has {settings:,} settings" in of_study
