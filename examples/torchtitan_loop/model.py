"""A transformer in plain torch, and samples that follow a rule which it can learn."""

import torch
from torch import nn

SAMPLES, TOKENS, VOCABULARY, WIDTH = 8, 32, 256, 64  # samples per step over all ranks


class Block(nn.Module):
    """A causal transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({name: nn.LayerNorm(WIDTH) for name in ("attention", "mlp")})
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, tokens, WIDTH] to the same shape."""
        heads = self.qkv(self.norms["attention"](x)).unflatten(-1, (3, 4, -1)).transpose(1, 3)
        query, key, value = heads.unbind(2)  # [samples, heads, tokens, WIDTH / 4]
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms["mlp"](x))))


class Transformer(nn.Module):
    """A language model; all ranks draw the same weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map [samples, tokens] to logits [samples, tokens, VOCABULARY]."""
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def samples_of(step: int) -> torch.Tensor:
    """Return the samples of a step over all ranks, [SAMPLES, TOKENS + 1]."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(VOCABULARY, (SAMPLES, 1), generator=generator)
    return (starts + 3 * torch.arange(TOKENS + 1)) % VOCABULARY
