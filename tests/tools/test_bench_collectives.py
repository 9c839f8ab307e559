"""The measurements of collectives run, count what they send, and can be read."""

import json

from frontier_llm.geometry.formats import Format
from tools.bench_collectives import main
from tools.convergence import Curve, draw, table


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
    assert flows["two hops", "int4"]["inter_bytes"] == Format("int4", 512, 2).slot(part, part).stop
    assert {one["kernels"] for one in facts["codec"]} >= {"copy", "torch"}
    assert all(one["quantise"] > 0 for one in facts["codec"])


def test_curves_are_compared_at_the_last_step_that_both_have(tmp_path):
    for name, losses in {"plain": [8.0, 7.0, 6.0], "zeropp": [8.0, 7.07]}.items():
        (tmp_path / name).mkdir()
        rows = [
            {"step": step, "loss": loss, "validation_loss": loss}
            for step, loss in enumerate(losses, start=1)
        ]
        text = "\n".join(json.dumps(row) for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    curves = [Curve.read(name, tmp_path / name) for name in ("plain", "zeropp")]
    assert table(curves)[2:] == [
        "| `plain` | 3 | 6.0000 | +0.00% |",
        "| `zeropp` | 2 | 7.0700 | +1.00% |",
    ]
    draw(curves, tmp_path / "curves.svg")
    assert "zeropp" in (tmp_path / "curves.svg").read_text()
