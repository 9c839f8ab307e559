"""The contenders train the same model, and times and memory are computed correctly."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.bench_pipeline import check_equal, main, simulated_seconds
from benchmarks.pipeline.pipeline_rank import CONTENDERS, Case, RankFigures, TimedStep
from benchmarks.testbed.held_bytes import HeldBytes
from benchmarks.testbed.shape import Shape
from frontier_llm.errors import TrainingError
from frontier_llm.geometry.pipeline_schedule import make_schedule
from frontier_llm.planner.timeline import ActionSeconds, Send, simulate

KIB = 1024
FIGURES = RankFigures((), losses=(6.0, 5.5), grad_norms=(2.0, 1.5), peak_bytes=0)


@pytest.mark.exhaustive
def test_all_contenders_run(tmp_path, capfd):
    file = tmp_path / "figures.json"
    assert main(["--quick", "--json", str(file)]) == 0
    (case,) = json.loads(file.read_text())["cases"]
    rows = {row["contender"]: row for row in case["rows"]}
    assert list(rows) == list(CONTENDERS)
    assert rows["1f1b"]["over_1f1b"] == rows["megatron-1f1b"]["over_megatron"] == 1
    assert {name for name, row in rows.items() if row["simulated_seconds"] is None} == {
        "megatron-1f1b",
        "megatron-interleaved",
    }
    assert min(row["seconds"] for row in rows.values()) > 0
    # both programs keep the same activations, except for outputs and messages under way
    for ours, theirs in (("1f1b", "megatron-1f1b"), ("interleaved", "megatron-interleaved")):
        assert rows[ours]["peak_bytes"] == pytest.approx(rows[theirs]["peak_bytes"], rel=0.1)
    assert rows["1f1b"]["peak_bytes"] < rows["1f1b-waiting"]["peak_bytes"]
    assert "2 ranks" in capfd.readouterr().out


def test_two_chunks_need_a_micro_batch_per_rank():
    case = Case(4, 2, Shape(8, 64, 4, 64, 32), waiting=1, rounds=1)
    assert {contender.chunks for contender in case.contenders.values()} == {1}
    assert replace(case, micro_batches=4).contenders == CONTENDERS


@pytest.mark.parametrize("changes", [{"losses": (6.0, 5.51)}, {"grad_norms": (float("nan"), 1.5)}])
def test_contenders_that_differ_are_an_error(changes):
    check_equal({"1f1b": FIGURES, "zb_v": FIGURES})
    with pytest.raises(TrainingError, match="zb_v"):
        check_equal({"1f1b": FIGURES, "zb_v": replace(FIGURES, **changes)})


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb_v", 2)])
def test_a_step_that_was_simulated_is_simulated_again(name, chunks):
    schedule = make_schedule(name, 3, chunks, 7, 0, recomputes=False)
    costs = [
        [ActionSeconds(1 + stage, 2 + stage, 1.5, 0.5 + chunk) for chunk in range(chunks)]
        for stage in range(3)
    ]
    events = simulate(schedule, costs, Send(hidden=0.25))
    begun, before, after = 10.0, 3.0, 4.0
    steps = [
        TimedStep(
            seconds=before + max(event.end for event in events) + after - 0.1 * stage,
            actions=tuple((begun + e.start, begun + e.end) for e in events if e.stage == stage),
        )
        for stage in range(3)
    ]
    assert simulated_seconds(schedule, steps, 0.25) == pytest.approx(steps[0].seconds)
    assert simulated_seconds(schedule, steps, 0.5) > 1.001 * steps[0].seconds


def test_only_new_tensors_that_live_count():
    existing = torch.zeros(100 * KIB, dtype=torch.uint8)
    with HeldBytes() as held:
        existing.add_(1)
        view = existing[KIB:]
        assert held.peak == 0
        first = existing[: 3 * KIB] + 1
        second = first.view(-1, KIB) * 2
        assert held.current == 6 * KIB
        del first
        assert held.current == 3 * KIB
        third = second[:2] + 1
        del second, third
    assert (held.current, held.peak) == (0, 6 * KIB)
    assert view.numel() == 99 * KIB


def test_memory_that_is_freed_by_resizing_does_not_count():
    with HeldBytes() as held:
        buffer = torch.zeros(KIB, dtype=torch.uint8)
        buffer.untyped_storage().resize_(0)
        assert held.current == 0
        other = buffer.new_zeros(2 * KIB)
        buffer.untyped_storage().resize_(KIB)
        assert held.current == 3 * KIB
        del other
    buffer.untyped_storage().resize_(5 * KIB)
    assert (held.current, held.peak) == (KIB, 3 * KIB)


def test_activations_count_until_their_backward_pass():
    weight = torch.ones(KIB, requires_grad=True)
    with HeldBytes() as held:
        output = (weight * 2).exp().sum()
        assert held.current == 4 * KIB + 4  # the result of exp, and the sum
        output.backward()
    weight.grad = None
    del output
    assert held.current == 0
