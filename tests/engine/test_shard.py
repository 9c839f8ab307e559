"""A sharded module trains as in one process, resumes in any layout, and names mistakes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from frontier_llm.errors import ConfigError, TrainingError
from frontier_llm.launch.world import World
from frontier_llm.library import AdamW, Checkpoints, Formats, Sharded, shard
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

STEPS, SAMPLES, RATE = 4, 8, 1e-2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x + self.inner(self.norm(x)).tanh(), None


class Model(nn.Module):
    """A tied table and layers, whose outputs are tuples, as in transformers."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.table.weight
        self.recomputes = recomputes

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x, _ = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())


def tokens_of(step: int) -> torch.Tensor:
    return torch.randint(32, (SAMPLES, 6), generator=torch.Generator().manual_seed(step))


def in_one_process() -> list[float]:
    """Return the norms of the gradients of all steps with torch's AdamW."""
    model, norms = Model(), []
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, RATE, betas=(0.9, 0.95), eps=1e-8)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        model(tokens_of(step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return norms


def train(sharded: Sharded, first: int, last: int, micro_batches: int = 1) -> list[float]:
    norms = []
    for step in range(first, last + 1):
        own = tokens_of(step).chunk(dist.get_world_size())[dist.get_rank()]
        for micro_batch in own.chunk(micro_batches):
            sharded.backward(sharded.module(micro_batch))
        norms.append(sharded.step(RATE))
    return norms


def norms_of(
    world: World, factors: dict[str, int], micro_batches: int, recomputes: bool, per_node: int
) -> list[float]:
    model = Model(recomputes=recomputes).train()
    sharded = shard(model, **factors, micro_batches=micro_batches, ranks_per_node=per_node)
    norms = train(sharded, 1, STEPS, micro_batches)
    assert sum(sent.total for sent in sharded.sent_bytes().values()) > 0
    with torch.no_grad():
        assert torch.isfinite(model(tokens_of(9)))
    return norms


@pytest.mark.parametrize(
    ("factors", "micro_batches", "recomputes", "per_node"),
    [
        ({"params": 4, "grads": 4, "optimizer": 4}, 1, False, 2),
        ({"params": 2, "grads": 4, "optimizer": 4}, 2, True, 4),
        ({"optimizer": 2}, 2, False, 4),
    ],
)
def test_the_norms_of_all_steps_are_those_of_one_process(
    factors: dict[str, int], micro_batches: int, recomputes: bool, per_node: int
) -> None:
    arguments = (factors, micro_batches, recomputes, per_node)
    for norms in run_ranks(norms_of, 4, *arguments):
        assert norms == pytest.approx(in_one_process(), rel=1e-5)


def save_and_go_on(world: World, folder: Path) -> list[float]:
    sharded = shard(Model().train(), params=2, grads=2, formats=Formats(keep_errors=False))
    checkpoints = Checkpoints(folder, sharded, every=2)
    norms = []
    for step in range(1, STEPS + 1):
        norms += train(sharded, step, step)
        checkpoints.save_if_due(step)
    checkpoints.close()
    return norms


def go_on_from(world: World, folder: Path, until: int) -> tuple[int, list[float], dict[str, Any]]:
    sharded = shard(Model().train(), formats=Formats.PLAIN, update=AdamW())
    checkpoints = Checkpoints(folder, sharded, every=100)
    step = checkpoints.restore()
    norms = train(sharded, step + 1, until)
    return step, norms, {name: tensor.shape for name, tensor in sharded.named_parameters()}


def test_two_ranks_continue_what_four_have_saved(tmp_path: Path) -> None:
    straight = run_ranks(save_and_go_on, 4, tmp_path)[0]
    newest = tmp_path / "step_00000004"
    newest.rename(tmp_path / "later")  # go back to step 2
    step, norms, shapes = run_ranks(go_on_from, 2, tmp_path, STEPS)[0]
    assert step == 2
    assert norms == pytest.approx(straight[2:], rel=1e-5)
    assert shapes["table.weight"] == (32, 16)
    assert len(shapes) == 1 + 4 * 3


def quantised(world: World) -> list[float]:
    return train(shard(Model().train(), params=2, grads=2, formats=Formats.ZEROPP), 1, STEPS)


def test_formats_change_the_norms_a_little() -> None:
    exact = in_one_process()
    for norms in run_ranks(quantised, 2, ranks_per_node=2):
        assert norms != pytest.approx(exact, rel=1e-6)
        assert norms == pytest.approx(exact, rel=0.1)


def refused(world: World) -> list[str]:
    def message(work: Callable[[], object]) -> str:
        with pytest.raises((ConfigError, TrainingError)) as caught:
            work()
        return str(caught.value)

    sharded = shard(Model().train())
    sharded.backward(sharded.module(tokens_of(1)))
    mixed = Model()
    mixed.layers[0].to(torch.bfloat16)
    return [
        message(lambda: shard(Model(), params=2, grads=3)),
        message(lambda: sharded.backward(sharded.module(tokens_of(1)))),
        message(lambda: shard(mixed)),
    ]


def test_mistakes_are_named() -> None:
    factors, passes, dtypes = run_ranks(refused, 1)[0]
    assert "use divisors of 1" in factors
    assert "backward was called 2 times in a step of 1" in passes
    assert "one dtype on one device" in dtypes
