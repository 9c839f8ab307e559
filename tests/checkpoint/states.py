"""Synthetic states in any sharding, whose values identify each element.

An element's value is a function of its tensor, its position, the state and the step, exact in fp32,
so restored states can be checked without a copy of the saved ones.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from frontier_llm.checkpoint.discovery import newest
from frontier_llm.checkpoint.restore import load
from frontier_llm.protocols import ParameterRecord, Placement, StateShard

STATES = ("master", "exp_avg", "exp_avg_sq")
MODEL = {
    "embedding.tokens.weight": (101, 24),
    "layers.0.ffn.up.weight": (48, 24),
    "layers.0.ffn.up.bias": (48,),
    "layers.0.ffn.down.weight": (24, 48),
    "layers.1.ffn.up.weight": (48, 24),
    "final_norm.weight": (24,),
}
CUT_DIM = {"layers.0.ffn.down.weight": 1, "final_norm.weight": None}


def value(name: str, state: str, step: int) -> np.ndarray:
    """Return the values of a whole tensor after a step."""
    shape = MODEL[name]
    salt = list(MODEL).index(name) * 10_000 + STATES.index(state) * 100_000 + step * 400_000
    return (np.arange(prod(shape), dtype=np.float32) + salt).reshape(shape)


def restore(folder: Path, shards: Iterable[StateShard], **options: Any) -> dict[str, Any] | None:
    """Load the newest undamaged checkpoint and return its meta; None if there is none."""
    checkpoint = newest(folder)
    if checkpoint is None:
        return None
    load(checkpoint, shards, **options)
    return checkpoint.manifest.meta


class States:
    """One rank's shards: tensors are split over `tensor` ranks, then flattened and over `data`."""

    def __init__(self, tensor: int = 1, data: int = 1, rank: int = 0, repeat: int = 1) -> None:
        """Create the shards of a rank; `repeat` multiplies the model, to have more to write."""
        at, self.rank = rank % tensor, rank
        self.shards: list[StateShard] = []
        for copy in range(repeat):
            for name, shape in MODEL.items():
                record = self._record(f"{name}.{copy}" if copy else name, name, shape, at, tensor)
                numel = record.parameter.numel()
                length = -(-numel // data)
                start = min(rank // tensor * length, numel)
                count = min(length, numel - start)
                if count:
                    tensors = {state: torch.full((count,), -1.0) for state in STATES}
                    self.shards.append(StateShard(record, start, tensors))

    @staticmethod
    def _record(
        name: str, base: str, shape: tuple[int, ...], at: int, tensor: int
    ) -> ParameterRecord:
        cut = CUT_DIM.get(base, 0)
        local, start, extent = list(shape), [0] * len(shape), list(shape)
        if cut is not None:
            local[cut] = -(-shape[cut] // tensor)  # the last ranks have padding
            start[cut] = min(at * local[cut], shape[cut])
            extent[cut] = max(0, min(local[cut], shape[cut] - start[cut]))
        box = Placement(name, shape, tuple(start), (0,) * len(shape), tuple(extent))
        return ParameterRecord(
            parameter=torch.nn.Parameter(torch.empty(local, device="meta")),
            unit="",
            placements=(box,),
            group="matrices",
            counted=cut is not None or at == 0,
            tensor_partial=False,
            tied=False,
        )

    def views(self) -> Iterator[tuple[np.ndarray, Placement, str, StateShard]]:
        for shard in self.shards:
            for state in STATES:
                yield shard.states[state].numpy(), shard.record.placements[0], state, shard

    def advance(self, step: int) -> None:
        """Set every element to its value after a step, and padding to NaN."""
        for run, box, state, shard in self.views():
            run[:] = self._expected(box, state, shard, step)

    def wrong(self, step: int) -> list[str]:
        """Return the names of states with wrong values after a step; padding is ignored."""
        found = []
        for run, box, state, shard in self.views():
            expected = self._expected(box, state, shard, step)
            covered = ~np.isnan(expected)
            if not np.array_equal(run[covered], expected[covered]):
                found.append(f"{box.name} {state}")
        return found

    @staticmethod
    def _expected(box: Placement, state: str, shard: StateShard, step: int) -> np.ndarray:
        local = torch.full(tuple(shard.record.parameter.shape), float("nan"))
        base = next(name for name in MODEL if box.name.startswith(name))
        whole = torch.from_numpy(value(base, state, step))
        box.local_view(local).copy_(global_view(box, whole))
        return local.flatten()[shard.start : shard.start + shard.master.numel()].numpy()


def global_view(box: Placement, whole: torch.Tensor) -> torch.Tensor:
    """Return a box as a view of the global tensor."""
    return whole[tuple(slice(s, s + n) for s, n in zip(box.global_start, box.shape, strict=True))]


def assemble(
    parts: Sequence[tuple[str, str, Placement, np.ndarray]],
) -> dict[tuple[str, str], Any]:
    """Assemble global tensors from boxes, which must cover every element and agree."""
    whole: dict[tuple[str, str], Any] = {}
    for name, state, box, part in parts:
        tensor = whole.setdefault((name, state), torch.full(box.global_shape, float("nan")))
        view = global_view(box, tensor)
        here = torch.from_numpy(part)
        known = ~torch.isnan(view) & ~torch.isnan(here)
        assert torch.equal(view[known], here[known]), f"ranks disagree on {name} {state}"
        view.copy_(torch.where(torch.isnan(here), view, here))
    for (name, state), tensor in whole.items():
        assert not torch.isnan(tensor).any(), f"{name} {state} is incomplete"
    return whole
