"""The measurements of collectives run and count the bytes that are sent."""

import json

from benchmarks.bench_collectives import FORMATS, main
from benchmarks.testbed.cut_texts import TEXTS, cut_figures, measure


def test_every_flow_and_format_is_measured(tmp_path, capsys):
    file = tmp_path / "figures.json"
    options = ["--quick", "--codec-elements", "4096", "--ranks-per-node", "2", "--json", str(file)]
    assert main(options) == 0
    assert "two hops" in capsys.readouterr().out
    facts = json.loads(file.read_text())
    flows = {(one["flow"], one["format"]): one for one in facts["flows"]}
    assert set(flows) == {
        (flow, code)
        for flow in ("gather", "reduce", "two hops")
        for code in ("fp32", "bf16", "int8", "int4")
    }
    part = facts["elements"] // 4
    assert flows["gather", "fp32"]["inter_bytes"] == 4 * part * 2  # to two ranks of the other node
    assert flows["two hops", "int4"]["inter_bytes"] == FORMATS[-1].slot(part, part).stop
    assert {one["kernels"] for one in facts["codec"]} >= {"copy", "torch"}
    assert all(one["quantise"] > 0 for one in facts["codec"])


def test_cuts_of_drawn_documents_are_counted():
    figures = {(one.text, one.cut): one for one in cut_figures(3)}
    assert len(figures) == 3 * 4
    for text in TEXTS:
        chosen, blind = figures[text, "by documents"], figures[text, "zig-zag"]
        assert chosen.worst_balance <= 1.05 < blind.balance <= blind.worst_balance
        assert chosen.gathered_share < 1 == figures[text, "zig-zag, gathered"].gathered_share
    # rank 1 has the pairs 3 and 1, and reads two rows that it does not have
    assert measure([3, 1], [[(0, 2)], [(2, 4)]]) == (2, 4 / 3.5)
