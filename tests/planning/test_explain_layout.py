"""The tool shows what the geometry says, for any configuration, and refuses what cannot be."""

import subprocess
import sys
from xml.etree import ElementTree

import pytest
from rich.console import Console

from frontier_lab.commands.explain_layout import explain, main
from frontier_lab.planning.state_layout import StateLayout, draw
from frontier_llm.cli.compose import compose, groups
from frontier_llm.cli.package_files import CONF
from frontier_llm.config import decode
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.partition import Factors

pytestmark = pytest.mark.slow

EXAMPLE = (
    "sharding.params=2",
    "sharding.grads=4",
    "sharding.optimizer=8",
    "launch.ranks=16",
    "launch.ranks_per_node=4",
)
TINY = ("model.layers=3", "model.hidden=8", "model.heads=2", "model.vocabulary=100")
SVG = "{http://www.w3.org/2000/svg}"


def layout_of(*overrides):
    return StateLayout.of(decode(compose(overrides)))


def text_of(layout):
    console = Console(width=100)
    with console.capture() as captured:
        for part in explain(layout):
            console.print(part)
    return captured.get()


def test_the_command_prints_bars_groups_bytes_and_memory():
    tool = [sys.executable, str(CONF.parent / "tools" / "explain_layout.py"), *EXAMPLE]
    done = subprocess.run(tool, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for words in ("tensor 1 x data 8 x pipeline 2", "(0 2) (1 3)", "gather_params", "moments"):
        assert words in done.stdout


def test_a_bar_shows_the_interval_of_its_rank():
    lines = text_of(layout_of(*EXAMPLE)).splitlines()
    row = next(line for line in lines if line.split()[:6] == ["6", "1", "0", "1", "1", "0"])
    assert row.split()[6:] == ["████████········", "····████········", "······██········"]


def test_many_ranks_are_cut_short():
    text = text_of(layout_of("parallel.pipeline=1", "sharding=zero3", "launch.ranks=64"))
    assert "and 32 more data ranks" in text
    assert "(0 1 2 3 4 5 ...)" in text


def test_a_node_is_what_launch_says_and_locally_one():
    within_nodes = layout_of(*EXAMPLE, "sharding.grads=node").factors
    assert within_nodes == Factors(2, 4, 8, 8, borders=(4,))
    local = layout_of("sharding=mics", "parallel.pipeline=1", "launch.ranks=8")
    assert local.factors == Factors(8, 8, 8, 8)


def test_the_fullest_stage_is_shown():
    """With a cut of 1 and 2 layers the second stage holds more, head included."""
    sizes = (*TINY, "data.vocabulary=100", "parallel.layers_per_stage=[1,2]")
    layout = layout_of(*sizes, "model.positions=rotary")
    assert layout.stage == 1
    assert list(layout.units) == ["embedding", "layers.1", "layers.2", "final_norm"]


def test_units_that_stay_whole_are_not_gathered_again():
    layout = layout_of("parallel.pipeline=1", "sharding=zero3", "launch.ranks=4")
    assert layout.resolved.micro_batches == 1
    gathered = layout.sent()["gather_params"]
    each_pass = 2 * 2 * layout.elements * 3 / 4
    assert all(each_pass / 2 < s.total < each_pass for s in gathered)


def test_a_batch_that_replicas_do_not_divide_is_rounded_up():
    layout = layout_of(*EXAMPLE, "data.micro_batch=3", "data.global_batch=25")
    assert layout.config.data.global_batch == 48
    assert layout.resolved.micro_batches == 2


@pytest.mark.parametrize("name", sorted(set(groups()["sharding"]) - {"amsp_8_8_32"}))
def test_every_choice_of_sharding_is_decoded_and_cuts_over_any_nodes(name):
    values = compose([f"sharding={name}", "launch.ranks=16"])
    assert decode(values).sharding.name == name
    for per_node in (1, 2, 8, 16):
        values["launch"]["ranks_per_node"] = per_node
        f = StateLayout.of(decode(values)).factors
        assert f.params <= f.grads <= f.optimizer <= f.data == 8
        if name == "mics":
            assert f.params == f.optimizer == min(per_node, f.data)


def test_the_drawing_has_a_line_a_rank_and_a_box_a_node():
    layout = layout_of(*EXAMPLE, "parallel.pipeline=1")
    root = ElementTree.fromstring(draw(layout))
    boxes = [r for r in root.iter(f"{SVG}rect") if r.get("fill") == "none"]
    held = [r for r in root.iter(f"{SVG}rect") if r.get("fill") == "#2c8a4b"]
    assert (len(boxes), len(held)) == (4, 16)
    size = layout.factors.padded(1)
    widest = next(r for r in root.iter(f"{SVG}rect") if r.get("fill") == "#e1f2e7")
    left, scale = float(widest.get("x")), float(widest.get("width")) / size
    for rank, box in enumerate(held):
        interval = layout.factors.interval(size, rank, layout.factors.optimizer)
        assert float(box.get("x")) == pytest.approx(left + interval.start * scale, abs=0.01)
        assert float(box.get("width")) == pytest.approx(interval.length * scale, abs=0.01)


def test_the_drawing_goes_to_a_file(tmp_path, capsys):
    file = tmp_path / "layout.svg"
    assert main(["sharding.params=2", "--svg", str(file), *EXAMPLE[1:]]) == 0
    assert ElementTree.parse(file).getroot().tag == f"{SVG}svg"
    assert capsys.readouterr().out == f"{file}\n"


def test_what_cannot_be_is_one_message(tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"configuration error at sharding\.params"):
        main(["sharding.params=3", "launch.ranks=16"])
    with pytest.raises(ConfigError, match="start 6 ranks"):
        main(["parallel.pipeline=3"])
    with pytest.raises(SystemExit, match="2"):
        main(["--svg", str(tmp_path / "absent" / "x.svg")])
    assert "a file that can be written" in capsys.readouterr().err


def test_an_experiment_says_how_many_ranks_it_has():
    grid = layout_of("experiment=frontier_1t").grid
    assert (grid.size, grid.ranks_per_node) == (3072, 8)
