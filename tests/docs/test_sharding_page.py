"""docs/sharding.md says what conf/ and geometry/ say."""

import pytest

from docs.generate.sharding_page import presets
from frontier_llm.cli.compose import groups

pytestmark = pytest.mark.slow


def _cells(line):
    return [cell.strip(" `") for cell in line.strip("|").split("|")]


def test_every_choice_has_a_row_of_numbers_done_by_hand():
    """32 data ranks, 8 a node, 4 micro-batches, 2 bytes of parameters and 4 of gradients."""
    rows = {cells[0]: cells[1:] for cells in map(_cells, list(presets())[2:])}
    of_one_model = {name for name in groups()["sharding"] if name.startswith("amsp")}
    assert set(rows) == set(groups()["sharding"]) - of_one_model
    kept, refresh = 2 + 4 + 12 / 32, 2 * 31 / 32
    states = 4 * 31 / 32
    assert rows["zero1"] == [
        "1, 1, 32", f"{kept:.2f}", "0", "0", f"{states:.2f}", f"{refresh:.2f}",
        f"{states + refresh:.2f}", f"{states + refresh:.2f}",
    ]  # fmt: skip
    gather, reduce, sums = 8 * 2 * 7 / 8, 4 * 4 * 7 / 8, 4 * 2 * (1 / 8 - 1 / 32)
    assert rows["mics"] == [
        "8, 8, 8", f"{18 / 8:.2f}", f"{gather:.2f}", f"{reduce:.2f}", f"{sums:.2f}", "0",
        f"{gather + reduce + sums:.2f}", f"{8 * sums:.2f}",
    ]  # fmt: skip
