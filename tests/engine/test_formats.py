"""Quantised messages change gradients, weights and losses by no more than their rounding.

The loss of `Products` is linear in its parameters, so that the rounding of parameters does not
change a gradient, and the exact gradients are known. A number that is sent as an integer of largest
magnitude Q changes by less than s = m / Q (1 + 2^-7), where m is the largest magnitude of its
block, and the last factor is the rounding of s to bf16 (collectives/blockwise.py).
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from frontier_llm.launch.world import World
from frontier_llm.library import AdamW, Formats, shard
from tests.engine.reference import RANKS, WIDTH, masters, rows
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

STEPS, RATE, EPSILON, LAYERS = 4, 10.0, 100.0, 3
SCALE = 1 + 2.0**-7
Q8, Q4 = 127, 7


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factors = x.roll(1, 0)
        terms = (layer(x) * factors * number for number, layer in enumerate(self.layers, 1))
        total: torch.Tensor = sum(terms, torch.zeros(())).mean(0).sum()
        return total


def gradient(step: int, rank: int) -> torch.Tensor:
    """Return [LAYERS, WIDTH, WIDTH], the exact gradients of a rank."""
    x = rows(step, rank)
    one = x.roll(1, 0).T @ x / len(x)
    return torch.stack([one * number for number in range(1, LAYERS + 1)])


def gradient_error(step: int) -> float:
    """Bound the error of an element of the mean gradient of four ranks on two nodes.

    Each rank sends its gradients in 8 bits inside its node, then a sum of two ranks in 4 bits.
    """
    largest = [float(gradient(step, rank).abs().max()) for rank in range(RANKS)]
    inside = sum(largest) / Q8 * SCALE
    across = (sum(largest) + inside) / Q4 * SCALE
    return (inside + across) / RANKS


def train(world: World, formats: Formats) -> list[tuple[float, float, torch.Tensor]]:
    """Return this rank's loss and norm of each step, and the masters before it."""
    torch.manual_seed(1)
    update = AdamW(clip_norm=None, weight_decay=0.0, epsilon=EPSILON)
    states = shard(
        Products().train(), params=4, formats=formats, update=update, ranks_per_node=2
    )  # fmt: skip
    found = []
    for step in range(1, STEPS + 1):
        before = torch.stack(list(masters(states).values()))
        loss = states.module(rows(step, dist.get_rank()))
        states.backward(loss)
        found.append((loss.item(), states.step(RATE), before))
    return found


def trained(formats: Formats) -> list[list[tuple[float, float, torch.Tensor]]]:
    return run_ranks(train, RANKS, formats)


def test_rounding_stays_within_its_bound() -> None:
    exact, rounded = trained(Formats.PLAIN), trained(Formats.ZEROPP)
    gradients = {step: sum(gradient(step, rank) for rank in range(RANKS)) / RANKS
                 for step in range(1, STEPS + 1)}  # fmt: skip
    for rank in range(RANKS):
        moved = 0.0  # bound of the error of a weight
        for step in range(1, STEPS + 1):
            loss, norm, weights = rounded[rank][step - 1]
            _, plain_norm, plain_weights = exact[rank][step - 1]
            true = float(gradients[step].norm())
            assert plain_norm == pytest.approx(true, rel=1e-5)
            # |norm(g + e) - norm(g)| <= norm(e) <= largest |e| * sqrt(elements)
            assert 1e-4 * true < abs(norm - true)
            assert abs(norm - true) < gradient_error(step) * math.sqrt(gradients[step].numel())
            # Epsilon is much larger than gradients. The update is then the mean of the gradients,
            # with weights whose sum is 1, divided by epsilon (up to the quotient of both).
            if step > 1:
                quotient = max(float(g.abs().max()) for g in gradients.values()) / EPSILON
                errors = [gradient_error(before) for before in range(1, step)]
                moved += RATE / EPSILON * max(errors) * (1 + 4 * quotient)
                assert 0 < float((weights - plain_weights).abs().max()) < moved
            # Parameters are rounded when they are sent after an update, and when they are gathered.
            assert loss != exact[rank][step - 1][0]
            own = gradient(step, rank)
            expected = float((weights * own).sum())
            steps = weights.abs().amax(dim=(1, 2)) / Q8 * SCALE
            first = float((steps[:, None, None] * own.abs()).sum())
            assert abs(loss - expected) < first + (first * (1 + SCALE / Q8) if step > 1 else 0)


def test_norms_without_quantisation_are_exact() -> None:
    for format_ in (Formats(params="bf16"), Formats(refresh="bf16")):
        for by_step in trained(format_):
            for step, (_, norm, _) in enumerate(by_step, 1):
                mean = sum(gradient(step, rank) for rank in range(RANKS)) / RANKS
                assert norm == pytest.approx(float(mean.norm()), rel=1e-5)
