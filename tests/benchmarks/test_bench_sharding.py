"""The benchmark compares the same training, counts the bytes that are sent, and cleans up."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.bench_sharding import main, make_cases, parse, row_of, speed
from benchmarks.harness import Contender
from benchmarks.peers.contenders import BY_DEFAULT, DEEPSPEED, factors_of, find
from benchmarks.peers.turn import RankFigures, Turn, TurnFigures
from benchmarks.testbed.shape import Shape
from frontier_llm.cli.options import run_command
from frontier_llm.errors import ConfigError
from tests.forked_train import Ended, run

pytestmark = pytest.mark.slow

TURN = Turn("ddp", 2, "fp32", Shape(2, 64, 4, 512, 64), 2, 1, warmup=1, steps=2, threads=1)

can_make_namespaces = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("tc"),
    reason="needs Linux, root and iproute2",
)


def bench(*arguments: str) -> Ended:
    return run(lambda: run_command(lambda: main(["--quick", *arguments])))


def tables(file: Path) -> list[dict[str, dict]]:
    cases = json.loads(file.read_text())["cases"]
    return [{row["contender"]: row for row in case["rows"]} for case in cases]


def figures(**changes: object) -> RankFigures:
    values = {
        "seconds": 0.5, "cpu_seconds": 0.4, "losses": [6.0, 5.9, 5.8], "parameters": 9,
        "start_bytes": 100, "peak_bytes": 150, "tcp_bytes": None, "sent_bytes": None,
        "counted_bytes": None, "idle_share": None,
    }  # fmt: skip
    return RankFigures(**{**values, **changes})


@pytest.mark.exhaustive
def test_contenders_train_the_same_model(tmp_path):
    names = ["ours-zero3", "ddp", "fsdp"]
    file = tmp_path / "figures.json"
    few = ["--micro-batches", "2", "--precision", "fp32"]
    done = bench("--contenders", *names, *few, "--json", str(file))
    assert done.code == 0, done.text
    (table,) = tables(file)
    assert list(table) == names
    assert len({row["parameters"] for row in table.values()}) == 1
    for row in table.values():
        assert row["median_tokens_per_second"] > 0
        assert row["first_loss"] == pytest.approx(math.log(512), rel=0.02)
        assert row["last_loss"] != row["first_loss"]
        assert 0 < row["own_bytes"] < row["peak_bytes"]
    assert table["ddp"]["first_loss"] == pytest.approx(table["fsdp"]["first_loss"], rel=1e-3)
    assert table["ddp"]["median_ratio"] == 1


@can_make_namespaces
def test_counted_bytes_equal_those_of_the_interfaces(tmp_path):
    file = tmp_path / "figures.json"
    size = ["--hidden", "128", "--link", "1gbit"]
    done = bench("--contenders", "ours-zero3", *size, "--json", str(file))
    assert done.code == 0, done.text
    fp32, bf16 = (table["ours-zero3"] for table in tables(file))
    for row in (fp32, bf16):
        assert row["sent_bytes"] == [pytest.approx(row["counted_bytes"], abs=4_000)]  # of barriers
    assert bf16["counted_bytes"] < 0.6 * fp32["counted_bytes"]


@pytest.mark.exhaustive
def test_contenders_that_cut_samples_differ_in_what_they_send(tmp_path):
    file = tmp_path / "figures.json"
    names = [f"context-{cut}" for cut in ("documents", "zigzag", "gather", "heads")]
    few = ["--precision", "fp32", "--samples", "1", "--steps", "1", "--sequence", "256"]
    done = bench("--contenders", *names, *few, "--json", str(file))
    assert done.code == 0, done.text
    (table,) = tables(file)
    assert [row["error"] for row in table.values()] == [None] * 4
    for key in ("first_loss", "last_loss"):
        losses = [row[key] for row in table.values()]
        assert losses == pytest.approx(losses[:1] * 4, rel=1e-6)
    documents, zigzag, gather, heads = (row["counted_bytes"] for row in table.values())
    assert max(documents, zigzag) < heads < gather
    # a token of 2 layers of width 64 in fp32: 3 exchanges of its key and value, or 2 of half of
    # them, of queries and of outputs
    assert gather - heads == 256 * 2 * 64 * 4 * (3 * 2 - 2 * 2)


@pytest.mark.exhaustive
def test_a_failing_contender_is_named_and_the_others_continue(tmp_path):
    file = tmp_path / "figures.json"
    wrong = "ours-2-1-2"  # gradients cannot be sharded over fewer ranks than parameters
    done = bench("--contenders", wrong, "ours-zero1", "--precision", "fp32", "--json", str(file))
    assert done.code == 1
    assert f"{wrong}: rank" in done.text
    assert "configuration error at sharding" in done.text
    assert "Traceback" not in done.text
    (table,) = tables(file)
    assert table["ours-zero1"]["error"] is None


def test_an_unknown_contender_is_rejected_before_anything_starts():
    done = bench("--contenders", "horovod")
    assert done.code == 2
    assert "got:    horovod" in done.text
    assert "Traceback" not in done.text


def test_links_need_root_and_iproute2(monkeypatch):
    from benchmarks.testbed import namespaces

    monkeypatch.setattr(namespaces.sys, "platform", "linux")
    monkeypatch.setattr(namespaces.shutil, "which", lambda program: None)
    with pytest.raises(ConfigError, match="apt-get install iproute2"):
        namespaces.check("1gbit")
    monkeypatch.setattr(namespaces.shutil, "which", lambda program: program)
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="as root"):
        namespaces.check("1gbit")


def sum_of_ranks(rank: int) -> float:
    total = torch.tensor(float(rank))
    torch.distributed.all_reduce(total)
    return total.item()


@can_make_namespaces
def test_namespaces_and_links_are_removed():
    from benchmarks.testbed.forked import on_ranks
    from benchmarks.testbed.namespaces import Packages, namespaces

    def ours() -> list[str]:
        shown = [
            subprocess.run(["ip", *what], check=True, capture_output=True, text=True).stdout
            for what in (["netns", "list"], ["-brief", "link"])
        ]
        return [line for line in "".join(shown).splitlines() if f"flm{os.getpid()}" in line]

    with namespaces(2, "1gbit"):
        assert len(ours()) == 5  # two namespaces, their links' outer ends, a bridge
    assert ours() == []
    with pytest.raises(ConfigError, match="rate"), namespaces(2, "fast"):
        pass
    assert ours() == []
    with namespaces(2, "200mbit", Packages(2, "1gbit")) as packages:
        assert len(ours()) == 2 + 4 + 2 + 1  # nodes, packages, links of nodes, a bridge
        assert on_ranks(sum_of_ranks, 4, namespaces=packages) == [6.0] * 4
    assert ours() == []


def test_the_contenders_depend_on_the_number_of_ranks():
    cases = make_cases(parse(["--ranks", "2", "4", "--precision", "fp32", "--deepspeed"]))
    two, four = ({one.name for one in case.peers} for case in cases)
    assert four - two == {"ours-mics", "ours-1-2-4"}
    assert {peer.name for peer in DEEPSPEED} < two


def test_any_factors_can_be_named():
    assert factors_of("ours-2-4-all") == ("2", "4", "all")
    assert find("ours-2-4-all").ranks_multiple == 4
    assert [find(name).name for name in BY_DEFAULT] == list(BY_DEFAULT)


def test_nodes_must_be_full():
    with pytest.raises(ConfigError, match="--ranks-per-node=3"):
        make_cases(parse(["--ranks", "4", "--ranks-per-node", "3"]))


def test_some_contender_must_run_on_the_ranks():
    with pytest.raises(ConfigError, match="ours-3-3-3: multiples of 3"):
        make_cases(parse(["--contenders", "ours-3-3-3", "--ranks", "2"]))


def test_a_row_combines_all_ranks_and_rounds():
    def outcome(name, *rounds):
        turns = [TurnFigures.of(TURN, [figures(**rank) for rank in ranks]) for ranks in rounds]
        return Contender(name, lambda: None, turns)

    half, whole = {"seconds": 0.5}, {"seconds": 1.0}
    base = outcome("ddp", [half, half], [whole, whole])
    mixed = [{"seconds": 0.5, "idle_share": 0.25}, {"seconds": 0.25}]
    mine = outcome("ours-zero1", mixed, mixed, [{"peak_bytes": 400}, {"start_bytes": 50}])
    assert base.values(speed) == [2 * 2 * 64 / 0.5, 2 * 2 * 64 / 1.0]
    row = row_of(mine, base, {"ddp": 3.0, "ours-zero1": 2.0})
    assert row["ratios"] == [1.0, 2.0]  # per round: the machine was equally slow for both
    assert (row["peak_bytes"], row["own_bytes"]) == (400, 300)
    assert row["idle_share"] == [0.25, 0.25]
    assert row["planned_ratio"] == 1.5


def test_a_loss_that_is_not_finite_is_an_error():
    with pytest.raises(ValueError, match="not finite"):
        TurnFigures.of(TURN, [figures(), figures(losses=[6.0, math.nan])])
