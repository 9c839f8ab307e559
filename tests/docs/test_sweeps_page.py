"""The examples of the page about sweeps: commands that a reader can copy."""

import shlex

import pytest

from docs.generate.sweeps_page import EXAMPLES, block
from frontier_llm.cli.sweep import first_configuration
from frontier_llm.cli.trial import Trial


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_command_on_the_page_is_the_one_that_ran(example):
    points = [Trial(["data.micro_batch=1"], "done", "", 9.0, 1200.0, 2**30, 4.0, 4.0)]
    lines = block(example, points)
    command = "\n".join(lines[lines.index("```bash") + 1 : lines.index("```")])
    assert max(map(len, command.splitlines())) <= 100
    words = shlex.split(command.replace("\\\n", ""))
    assert words == ["python", "train.py", "-m", *EXAMPLES[example]]
    assert any(line.startswith("| 1.20k") and line.endswith("| done |") for line in lines)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_a_configuration(example):
    assert first_configuration(EXAMPLES[example]).data.global_batch == 8
