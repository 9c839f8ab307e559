"""Runs whose samples are cut over context ranks: what they log, save and go on from."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from frontier_llm.data.batch import Batch
from frontier_llm.launch.world import World
from tests.batches import random_batch
from tests.covering import covering, exhaustive
from tests.forked_train import TINY, train
from tests.model.context_traffic import context_bytes
from tests.ranks import run_ranks
from tests.texts import paragraphs
from tests.trainer.rig import make_rig
from tests.trainer.test_resume import learned, lines, read
from tests.values import tiny_values

pytestmark = pytest.mark.slow

STEPS = 6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("corpus")
    records = (json.dumps({"text": part}) for part in paragraphs(40))
    (folder / "text.jsonl").write_text("\n".join(records))
    where = (f"data.path={folder}/text.jsonl", f"data.directory={folder}/prepared")
    return (
        *TINY, *where, "optimizer.warmup_steps=2", "data.documents=separate", "launch.ranks=4",
        "parallel.pipeline=1", "model.positions=rotary", "data.loss_mean=tokens",
        f"optimizer.decay_steps={STEPS}",
    )  # fmt: skip


Runs = Callable[[int], Path]


@pytest.fixture(scope="module")
def run_with(tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return a run with so many context ranks, validation and text."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def run(context: int) -> Path:
        ended = train(
            *tiny, f"run.dir={folder}/{context}", f"trainer.steps={STEPS}",
            f"parallel.context={context}", "trainer.evaluate_every_steps=3",
            "trainer.sample_tokens=8", "sharding=zero1",
        )  # fmt: skip
        assert ended.code == 0, ended.text
        parts = f" (replicas {4 // context} x context {context})" if context > 1 else ""
        assert f"data 4{parts}; sharding=zero1" in ended.text
        return folder / str(context)

    return run


@pytest.mark.parametrize("context", covering([2, 4], [2]))
def test_runs_of_all_contexts_are_one_run(context: int, run_with: Runs) -> None:
    alone, cut = lines(run_with(1)), lines(run_with(context))
    assert read(run_with(context)) == read(run_with(1)), "the same samples and digests"
    for step, wanted in zip(cut, alone, strict=True):
        assert step["loss"] == pytest.approx(wanted["loss"], rel=2e-6)
    assert cut[0]["grad_norm"] == pytest.approx(alone[0]["grad_norm"], rel=1e-6)
    found = [row["validation_loss"] for row in cut if row["validation_loss"] is not None]
    expected = [row["validation_loss"] for row in alone if row["validation_loss"] is not None]
    assert len(found) == 2
    assert found == pytest.approx(expected, rel=1e-6)
    assert [m[3] for m in learned(run_with(context))] == [m[3] for m in learned(run_with(1))]
    assert all(row["sent_bytes"]["context"]["node"] > 0 for row in cut)
    assert not any(row["sent_bytes"]["context"]["node"] for row in alone)


def test_another_context_goes_on_as_the_same_run(
    tiny: tuple[str, ...], tmp_path: Path, run_with: Runs
) -> None:
    """Saved with two context ranks, read with four, and with one by half of the ranks."""
    run = tmp_path / "run"
    for steps, context, ranks in ((2, 2, 4), (4, 4, 4), (STEPS, 1, 2)):
        ended = train(
            *tiny, f"run.dir={run}", f"trainer.steps={steps}", f"parallel.context={context}",
            "sharding=zero1", "trainer.evaluate_every_steps=4", f"launch.ranks={ranks}",
            "launch.elastic=true",
        )  # fmt: skip
        assert ended.code == 0, ended.text
    assert read(run) == read(run_with(1))
    for mine, wanted in zip(learned(run), learned(run_with(1)), strict=True):
        (*found, norm, samples), (*expected, whole_norm, whole_samples) = mine, wanted
        assert [*found, samples] == pytest.approx([*expected, whole_samples], rel=1e-5)
        # the norm of a step with an unusual gradient amplifies what 1e-7 of the parameters change
        assert norm == pytest.approx(whole_norm, rel=3e-4)


def masked_and_not(world: World, values: dict[str, Any]) -> list[float]:
    """Return loss and norm of a step whose samples predict the tokens of one context rank."""
    rig = make_rig(world, values)
    config, context = rig.config, rig.groups.context
    batch = random_batch(config, range(2))
    mask = torch.zeros(2, config.data.sequence_length)
    mask[:, :2], mask[1, 2] = 1, 1
    batch = Batch(batch.tokens, batch.labels, batch.positions, mask)
    if context is not None:
        batch = batch.part(context.size, context.rank, config.data.loss_mean)
    result = rig.step.run(1, [batch], 0.0)
    return [result.loss, result.grad_norm]


@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_ranks_without_labels_add_nothing(by: str) -> None:
    settings = ["data.global_batch=2", "data.micro_batch=2", f"data.loss_mean={by}"]
    values = [
        tiny_values(*settings, "data.sequence_length=16", f"parallel.context={n}") for n in (1, 4)
    ]
    (alone,) = run_ranks(masked_and_not, 1, values[0])
    for found in run_ranks(masked_and_not, 4, values[1]):
        assert found == pytest.approx(alone, rel=1e-6)


def sent_in_a_step(world: World, values: dict[str, Any]) -> tuple[float, float]:
    """Return the bytes counted in the second step, and those that are predicted."""
    rig = make_rig(world, values)
    rig.train(1)
    context = rig.groups.context
    assert context is not None
    (result,) = rig.train(1, first=1)
    data, traffic = rig.config.data, rig.model.layout.activation_traffic
    layers = sum(len(chunk.model_chunk.layers) for chunk in rig.model.chunks)
    predicted = 0
    for batch in rig.batches(1):
        table = batch.cumulative_lengths
        lengths = [[data.sequence_length]] if table is None else table.diff(dim=1).tolist()
        samples = [[n for n in of_sample if n] for of_sample in lengths]
        predicted += sum(context_bytes(traffic, samples, context.size, context.rank, layers))
    return result.sent["context"].total, predicted


@pytest.mark.parametrize(
    ("recompute", "documents", "key_heads"),
    [
        ("full", "joined", 4),
        *exhaustive(
            ("none", "separate", 2),
            *(("none", "joined", heads) for heads in (2, 4)),
            ("selective", "joined", 2),
            ("full", "separate", 2),
        ),
    ],
)
def test_a_step_sends_what_is_predicted(recompute: str, documents: str, key_heads: int) -> None:
    """Keys twice and gradients once, whatever is computed again; or heads, with 4 key heads."""
    values = tiny_values(
        f"data.documents={documents}", "model.heads=4", f"model.kv_heads={key_heads}",
        "data.sequence_length=16", "parallel.context=2", "parallel.tensor=2",
        f"recompute={recompute}", "parallel.pipeline=2", "model.positions=rotary",
    )  # fmt: skip
    results = run_ranks(sent_in_a_step, 8, values)
    counted, predicted = results[0][0], sum(each for _, each in results)
    assert counted == predicted > 0


def weights_beside(world: World, values: dict[str, Any], changed: int) -> list[torch.Tensor]:
    """Train two steps, in which a document that predicts nothing has other tokens."""
    rig = make_rig(world, values)
    context = rig.groups.context
    assert context is not None
    batch = random_batch(rig.config, range(1))
    tokens, mask = batch.tokens.clone(), torch.ones(1, 16)
    tokens[:, 3:12] = (tokens[:, 3:12] + changed) % rig.config.model.vocabulary
    mask[:, 3:12] = 0
    documents = rig.config.data.documents == "separate"
    table = torch.tensor([[0, 3, 12, 16]], dtype=torch.int32) if documents else None
    batch = Batch(tokens, batch.labels, batch.positions, mask, table)
    part = batch.part(context.size, context.rank, rig.config.data.loss_mean)
    results = [rig.step.run(step, [part], 0.01) for step in (1, 2)]
    found = [torch.tensor([[result.loss, result.grad_norm] for result in results])]
    return found + [record.parameter.detach().clone() for record in rig.model.records]


@pytest.mark.parametrize("context", covering([2, 4], [2]))
@pytest.mark.parametrize("documents", ["separate", "joined"])
def test_steps_do_not_depend_on_another_document(context: int, documents: str) -> None:
    """Bitwise; the document is longer than a part, so several ranks have tokens of it."""
    values = tiny_values(
        "data.global_batch=1", "data.sequence_length=16", "model.positions=rotary",
        f"data.documents={documents}", f"parallel.context={context}", "sharding=replicated",
    )  # fmt: skip
    before, after = (run_ranks(weights_beside, context, values, n) for n in (0, 1))
    for one, other in zip(before, after, strict=True):
        same = [torch.equal(a, b) for a, b in zip(one, other, strict=True)]
        assert all(same) if documents == "separate" else not all(same)
