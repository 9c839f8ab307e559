"""The measurements of collectives run and count the bytes that are sent."""

import json

from benchmarks.bench_collectives import FORMATS, main


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
