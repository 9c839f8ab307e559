"""Small modules, each with a property that shards of its states must get right."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x)


Layers = Callable[["Net", torch.Tensor], torch.Tensor]


def in_order(net: "Net", x: torch.Tensor) -> torch.Tensor:
    for layer in net.layers:
        x = layer(x)
    return x


class Net(nn.Module):
    """A projection, layers, and a projection; `run` calls the layers, `change` changes the module.

    Attributes:
        step, rank: those of the batch, for layers that differ by them.
    """

    def __init__(
        self,
        block: Callable[[], nn.Module] = Block,
        run: Layers = in_order,
        change: Callable[["Net"], object] = lambda net: None,
    ) -> None:
        super().__init__()
        self.step = self.rank = 0
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.run = run
        change(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.run(self, self.inp(x)))
        return out


class Tied(nn.Module):
    """A table that also computes the logits; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x * 7).long() % 20
        hidden = self.table(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.roll(1, 1).flatten())


class Table(nn.Module):
    """A table whose gradients are sparse on ranks, and dense in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH, sparse=dist.is_initialized())
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.table((x * 7).long() % 20)).mean(1)
        return out


Named = namedtuple("Named", "x y")


@dataclass
class Output:
    x: torch.Tensor


CONTAINERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "list": (lambda x: [x], lambda output: output[0]),
    "dict": (lambda x: {"x": x}, lambda output: output["x"]),
    "named tuple": (lambda x: Named(x, torch.ones(1)), lambda output: output.x),
    "dataclass": (lambda x: Output(x), lambda output: output.x),
    "object": (lambda x: SimpleNamespace(x=x), lambda output: output.x),
    "nested": (lambda x: {"a": [(None, x)]}, lambda output: output["a"][0][1]),
}
"""How a layer puts its result into an output, and how the model takes it out."""


class Packing(Block):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.pack = CONTAINERS[kind][0]

    def forward(self, x: torch.Tensor) -> Any:
        return self.pack(self.body(x))


def unpacking(kind: str) -> Layers:
    def run(net: Net, x: torch.Tensor) -> torch.Tensor:
        for layer in net.layers:
            x = CONTAINERS[kind][1](layer(x))
        return x

    return run


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.b(self.a(x)))


class WithUnused(Block):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)


class Two(nn.Module):
    """Two linear layers and two outputs, of which a caller may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.a(x)), torch.tanh(self.b(x))


class Auxiliary(Block):
    """Keeps a loss as an attribute, like the router of a mixture of experts."""

    returns_input = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x))
        self.loss = self.down(torch.sigmoid(hidden)).square().mean()
        return x if self.returns_input else x + self.down(torch.tanh(hidden))


class OnlyAuxiliary(Auxiliary):
    returns_input = True


class Recomputed(Block):
    """Recomputes its activations, with dropout."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: torch.Tensor) -> Any:
        def body(x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.body(x), self.rate)

        return checkpoint(body, x, use_reentrant=False)


class Scaled(Block):
    """Has a parameter of no dimension, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.factor * (self.body(x) - x)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Attention(nn.Module):
    """Torch's attention reads `out_proj.weight` without calling the module that owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.stack([x, -x, x.roll(1, 1)], 1)).mean(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.unsqueeze(1).repeat(1, 3, 1))[0].mean(1)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = x.view(-1, 1, 4, 4).repeat(1, 3, 1, 1)
        for layer in self.layers:
            images = torch.tanh(layer(images))
        return images[:, 0].flatten(1)


class Wide(nn.Module):
    """Two linear layers; the middle has a width of its own (torch's MLP of FSDP's tests)."""

    def __init__(self, factor: int, has_buffer: bool) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, factor * WIDTH)
        self.out = nn.Linear(factor * WIDTH, WIDTH)
        if has_buffer:
            self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.out(F.relu(self.inp(x))))
        return x + self.shift if hasattr(self, "shift") else x


class Stack(nn.Module):
    """Layers and nothing else."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
