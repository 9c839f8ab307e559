"""The page of models and clusters says what conf/ says."""

import pytest

from docs.generate.__main__ import files_of
from docs.generate.models_and_clusters_page import fullest_stage_bytes, models, resolved
from frontier_llm.cli.compose import compose, groups
from frontier_llm.cli.experiments import Header
from frontier_llm.cli.machine_defaults import OF_THIS_MACHINE
from frontier_llm.config import decode

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
def test_the_page_has_a_row_for_everything_that_can_be_chosen():
    (text,) = files_of("models_and_clusters").values()
    of_machine = set(OF_THIS_MACHINE)
    for name in {*models(), *groups()["experiment"], *groups()["cluster"]} - of_machine:
        assert f"| `{name}` |" in text


def test_a_header_joins_what_a_backslash_splits(tmp_path):
    file = tmp_path / "one.yaml"
    file.write_text(
        "# @package _global_\n# A title (arXiv:1).\n# More.\n# ranks: 16\n# run: srun -N 2 \\\n"
        "#   python train.py\ndefaults: []\n# ranks: 3\n"
    )
    assert Header.read(file) == Header("A title (arXiv:1). More.", 16, "srun -N 2 python train.py")


def test_a_header_without_its_ranks_is_refused(tmp_path):
    file = tmp_path / "one.yaml"
    file.write_text("# A title.\n# run: python train.py\n")
    with pytest.raises(ValueError, match=r"one\.yaml: '# ranks: N'"):
        Header.read(file)


def test_states_are_those_of_the_fullest_stage():
    sizes = ["model.layers=3", "model.hidden=8", "model.heads=2", "model.vocabulary=100"]
    run = ["data.vocabulary=100", "data.sequence_length=16", "parallel.pipeline=2"]
    config = decode(compose([*sizes, *run]))
    layer = 12 * 8 * 8 + 13 * 8 + 24  # padded to a multiple of 64 elements
    first = 2 * layer + 128 * 8 + 16 * 8  # embedding, padded to 128 rows, and positions
    last = layer + 128 * 8 + 2 * 8 + 48  # the tied head's copy and the last norm, padded
    assert fullest_stage_bytes(resolved(config, 2)) == 18 * max(first, last)
