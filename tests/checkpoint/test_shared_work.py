"""Replicas share the work of saving: each element is written once, and equally many by each."""

from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.checkpoint.write_plan import part_of
from frontier_llm.protocols import StateShard


def _shard(index: int, elements: int, *, counted: bool) -> StateShard:
    names = ("master", "exp_avg", "exp_avg_sq")
    states = {s: torch.arange(elements, dtype=torch.float32) + 100 * n for n, s in enumerate(names)}
    return StateShard(cast(Any, SimpleNamespace(counted=counted, index=index)), 7, states)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=8), st.integers(1, 5))
def test_parts_tile_what_is_counted(sizes: list[tuple[int, bool]], count: int):
    shards = [_shard(i, n, counted=counted) for i, (n, counted) in enumerate(sizes)]
    parts = [list(part_of(shards, number, count)) for number in range(count)]
    seen = []
    for shard in (shard for part in parts for shard in part):
        places = range(shard.start - 7, shard.start - 7 + shard.master.numel())
        seen += [(shard.record.index, place) for place in places]
        for n, state in enumerate(shard.states.values()):
            assert (state - 100 * n).tolist() == list(places)
    assert seen == [(i, at) for i, (n, counted) in enumerate(sizes) if counted for at in range(n)]
    written = [sum(shard.master.numel() for shard in part) for part in parts]
    assert max(written) - min(written) <= 1
