"""GPT-2 in plain torch, as a baseline of benchmarks; imports only torch."""

import torch
from torch import nn
from torch.nn import functional as F

INIT_STD = 0.02


class PlainLayer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.ffn_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.output = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, sequence, hidden] to the same shape."""
        samples, sequence, hidden = x.shape
        parts = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        by_head = (samples, sequence, self.heads, -1)
        q, k, v = (part.view(by_head).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(samples, sequence, hidden))
        return x + self.down(F.gelu(self.up(self.ffn_norm(x)), approximate="tanh"))


class PlainGpt(nn.Module):
    """The model, whose output layer shares the weights of the token embedding (tied)."""

    def __init__(
        self, *, layers: int, hidden: int, heads: int, vocabulary: int, sequence: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(sequence, hidden)
        self.layers = nn.ModuleList(PlainLayer(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=INIT_STD)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a micro-batch.

        Args:
            tokens: [samples, sequence] int64.
            labels: [samples, sequence] int64; the next token of each token.

        Returns:
            The loss in nats per token, [] fp32.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        logits = self.norm(x) @ self.tokens.weight.T
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
