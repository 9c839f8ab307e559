"""Samples that are cut over context ranks: the losses and gradients of one process."""

import pytest
import torch

from tests.covering import covering
from tests.ranks import run_ranks
from tests.trainer.test_documents import MODELS as SEPARATE
from tests.trainer.test_loss_mean import ADAMW
from tests.trainer.test_parity import MODELS as JOINED
from tests.trainer.test_parity import STEPS, check, reference, trained
from tests.trainer.test_quantised import ZEROPP, train
from tests.trainer.test_sharding_parity import factors
from tests.values import tiny_values

pytestmark = pytest.mark.slow

BATCH = ["data.global_batch=4", "data.sequence_length=16"]
MODELS = {
    **JOINED,
    **SEPARATE,
    "normed": ["model.qk_norm=width", "model.positions=rotary", "optimizer.z_loss=0.01"],
    "by_tokens": ["data.documents=separate", "data.loss_mean=tokens", "model.qk_norm=head"],
    "window": ["model.window=5", "model.attention_softcap=0.5"],
}
PIPELINE = ("parallel.context=2", "parallel.pipeline=2")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "two": (2, ("parallel.context=2", "data.micro_batch=2")),
    "two_selective": (2, ("parallel.context=2", "recompute=selective")),
    "two_full": (2, ("parallel.context=2", "recompute=full")),
    "four": (4, ("parallel.context=4",)),
    "zero1": (4, ("parallel.context=2", "sharding=zero1")),
    "zero3": (4, ("parallel.context=2", "sharding=zero3")),
    "mixed_states": (
        4,
        (
            *("parallel.context=4", "sharding=replicated", "sharding.params=2"),
            *("sharding.grads=2", "sharding.optimizer=4"),
        ),
    ),
    "tensor": (4, ("parallel.context=2", "parallel.tensor=2")),
    "sequence": (4, ("parallel.context=2", "parallel.tensor=2", "parallel.sequence=true")),
    "1f1b": (4, (*PIPELINE, "recompute=full")),
    "interleaved": (4, (*PIPELINE, "parallel.chunks=2")),
    "zb_h1": (4, (*PIPELINE, "parallel.schedule=zb_h1")),
    "zb_v": (4, (*PIPELINE, "parallel.schedule=zb_v", "parallel.chunks=2")),
    "v_half": (4, (*PIPELINE, "parallel.schedule=v_half", "parallel.chunks=2", "recompute=full")),
}
CHOSEN = [
    ("two", "window"), ("two_full", "learned"), ("two_selective", "normed"),
    ("four", "rotary_window_capped"), ("zero3", "by_tokens"), ("mixed_states", "tied_gelu"),
    ("tensor", "normed"), ("sequence", "untied_gqa_swiglu"), ("zb_h1", "by_tokens"),
    ("zb_v", "untied_gqa_swiglu"),
]  # fmt: skip
NAMES = list(MODELS)
COVERED = [
    (layout, NAMES[(NAMES.index(model) + shift) % len(NAMES)])
    for layout, model in CHOSEN
    for shift in (2, 4)
]
"""Each layout with two other models."""
COVERED += [
    ("zero1", "window"), ("zero1", "learned"), ("1f1b", "learned"), ("1f1b", "normed"),
    ("interleaved", "tied_gelu"), ("interleaved", "window"),
    ("v_half", "rotary_window_capped"), ("v_half", "by_tokens"),
]  # fmt: skip
"""Layouts whose cut, states, schedules and recomputation the others have."""
CASES = [*CHOSEN, *COVERED]
COVERED += [
    case
    for case in CHOSEN
    if case[0] in ("two", "two_selective", "tensor", "zb_v", "mixed_states", "four")
]
"""Two ranks without, and with less recomputation; a tensor group without parts of the sequence;
states and stages that are cut in yet another way; all ranks in one cut, which test_context_run.py
has."""


def overrides_of(case: tuple[str, str]) -> tuple[str, ...]:
    layout, model = case
    return (*MODELS[model], *LAYOUTS[layout][1], *BATCH)


@pytest.mark.parametrize("case", covering(CASES, COVERED), ids="-".join)
def test_context_ranks_are_one_process(case: tuple[str, str]) -> None:
    size = LAYOUTS[case[0]][0]
    together = tuple(
        overrides_of(other)
        for other in CASES
        if LAYOUTS[other[0]][0] == size and (other in COVERED) == (case in COVERED)
    )
    results = trained(size, together)[overrides_of(case)]
    alone = [o for o in (*LAYOUTS[case[0]][1], *BATCH) if not o.startswith("recompute")]
    check(results, alone, MODELS[case[1]], STEPS)


def test_quantised_collectives_of_cut_samples_stay_as_near() -> None:
    """On two nodes: not further from plain fp32 than the same ranks without a cut, and equal."""
    model = (*MODELS["by_tokens"], *ADAMW, "data.global_batch=8")
    losses, norms = reference(model, 3)[:2]
    errors = []
    for context in (1, 2):
        values = tiny_values(*model, *ZEROPP, *factors((2, 4, 4)), f"parallel.context={context}")
        ranks = run_ranks(train, 4, values, "fp32", 3, ranks_per_node=2)
        errors.append(max(abs(a / b - 1) for a, b in zip(ranks[0]["losses"], losses, strict=True)))
        assert ranks[0]["norms"][0] == pytest.approx(norms[0], rel=2e-2)
        for other in ranks[1:]:
            assert other["losses"] == ranks[0]["losses"]
            for name, tensor in ranks[0]["weights"].items():
                assert torch.equal(other["weights"][name], tensor), name
    assert 0 < errors[1] < 2 * errors[0]
