"""The comparison with FSDP2 trains the same model, counts the bytes, and notices other losses."""

import json
import math
import socket
import struct
from pathlib import Path

import pytest

from benchmarks.bench_library import baseline_of, check_losses, main, save_row, speed_row
from benchmarks.harness import Contender, alternating
from benchmarks.own_loop import CONTENDERS, SAVERS, SaveFigures
from benchmarks.peers.turn import TurnFigures
from benchmarks.testbed.sent_counter import SentBytes, read_info, tcp_sent_bytes
from frontier_llm.errors import TrainingError
from tests.forked_train import run

pytestmark = pytest.mark.slow


def speed(seconds: float = 1.0, losses: tuple[float, ...] = (6.0, 5.0)) -> TurnFigures:
    of_ranks = [[6.0, 5.0], list(losses)]
    return TurnFigures(1.0, seconds, 0.5, of_ranks, 9, 0, 0, 100.0, None, None, 0.1, 0.0)


def outcome(name: str, rounds: list) -> Contender:
    return Contender(name, lambda: None, rounds)


@pytest.mark.exhaustive
def test_contenders_train_alike_and_bytes_are_counted(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "figures.json"
    arguments = ["--quick", "--precision", "bf16", "--folder", str(tmp_path), "--json", str(file)]
    done = run(lambda: main(arguments))
    assert done.code == 0, done.text
    figures = json.loads(file.read_text())
    (case,) = figures["speed"]
    rows = {row["contender"]: row for row in case["rows"]}
    assert list(rows) == list(CONTENDERS)
    for row in rows.values():
        assert row["losses"][0] == pytest.approx(math.log(256), rel=0.02)
    library, fsdp = rows["library"], rows["fsdp2"]
    assert library["sent_bytes"] == pytest.approx(library["counted_bytes"], rel=0.05)
    assert fsdp["sent_bytes"] > 1.3 * library["sent_bytes"]  # gloo's reduce-scatter
    assert rows[fsdp["baseline"]]["speedup"]["all"] == [1.0]
    assert [row["saver"] for row in figures["saves"]["rows"]] == list(SAVERS)
    assert all(row["blocked_seconds"]["min"] > 0 for row in figures["saves"]["rows"])
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"], "nothing is left"


def test_only_this_process_is_counted_and_each_byte_once() -> None:
    """A kernel sends bytes again if a receiver is late, which other programs may cause."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as sender, server.accept()[0]:
            sender.setblocking(False)
            before, written = tcp_sent_bytes(), sender.send(bytes(10_000_000))
            after = tcp_sent_bytes()
            assert before
            assert after
            assert after.written - before.written == written  # of which a part waits in a buffer
    info = bytearray(256)
    struct.pack_into("=I", info, 144, 5)
    struct.pack_into("=QQ", info, 200, 1000, 24)
    assert read_info(bytes(info)) == SentBytes(written=981, resent=24)


def test_losses_that_differ_are_an_error() -> None:
    same = [outcome(name, [speed()]) for name in ("library", "fsdp2")]
    assert check_losses(same, "fp32") == 0
    for losses in ((6.0, 5.01), (6.0, math.nan)):
        other = outcome("fsdp2", [speed(losses=losses)])
        with pytest.raises(TrainingError, match="losses in fp32 of fsdp2"):
            check_losses([same[0], other], "fp32")
    near = outcome("fsdp2", [speed(losses=(6.0, 5.01))])
    assert check_losses([same[0], near], "bf16") == pytest.approx(0.002)


def test_ratios_are_those_of_a_round() -> None:
    base = outcome("fsdp2", [speed(1.0), speed(4.0)])
    own = outcome("library", [speed(0.5), speed(1.0)])
    assert speed_row(own, base)["speedup"]["all"] == [2.0, 4.0]
    slow = outcome("fsdp2-prefetch", [speed(3.0), speed(3.0)])
    assert baseline_of([own, slow, base]) is base
    saved = outcome("library", [[SaveFigures(0.1, 3.0, 2.0), SaveFigures(0.2, 3.0, 2.0)]])
    row = save_row(saved)
    assert row["blocked_seconds"]["median"] == 0.2
    assert (row["slowdown"]["median"], row["added_seconds"]["median"]) == (1.5, 1.0)


def test_every_second_round_is_reversed() -> None:
    assert [alternating("AB", index) for index in range(3)] == ["AB", "BA", "AB"]
