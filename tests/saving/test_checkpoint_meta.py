"""The counters in a checkpoint are checked before a run continues with them."""

import json
import math
from typing import Any

import pytest

from frontier_llm.errors import CheckpointError
from frontier_llm.saving.restorer import check_meta
from frontier_llm.trainer.progress import Progress
from tests.hostile import at, changed, leaves

META: dict[str, Any] = {
    "progress": Progress(step=4, updates=4, recent_losses=(2.5, 2.4)).to_meta(),
    "loss_scale": {"value": 65536.0, "good_steps": 3},
    "corpus": "00", "tokenizer": "00", "start": "00", "config": {"model": {}},
    "blend": [{"first_sample": 0, "weights": {"en": 0.7, "de": 0.3}}],
}  # fmt: skip
META = json.loads(json.dumps(META))


def test_the_meta_of_runs_is_accepted() -> None:
    check_meta("step", META)
    check_meta("step", {**META, "loss_scale": {}, "blend": None, "later": 1})
    older = {key: META["progress"][key] for key in ("step", "next_sample", "updates")}
    check_meta("step", {**META, "progress": older})


@pytest.mark.parametrize(
    "path", [p for p in leaves(META) if p[-1] not in ("tokenizer", "start", "good_steps")]
)
def test_wrong_values_are_refused_with_their_name(path: tuple[Any, ...]) -> None:
    old = at(META, path)
    wrong = {
        float: [math.nan, math.inf, "x", []],
        str: [3, None],
        int: [-1, 10**30, 1.5, "x", None],
    }
    for new in wrong[type(old)]:
        with pytest.raises(CheckpointError, match=rf"step is damaged at meta\.{path[0]}"):
            check_meta("step", changed(META, path, new))


@pytest.mark.parametrize("key", ["progress", "loss_scale", "corpus", "config"])
def test_an_absent_part_is_refused(key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"meta\.{key}: Field required"):
        check_meta("step", {name: value for name, value in META.items() if name != key})
