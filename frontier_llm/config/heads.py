"""Numbers of heads and widths that pass all rules, for the advice of a rule that refuses some."""

import math

from frontier_llm.config.model import ModelConfig
from frontier_llm.config.run import RunConfig


def next_heads(config: RunConfig) -> int:
    """Return the next larger number of heads that passes the other rules.

    If there is no such number, return the next multiple of the tensor ranks.
    """
    heads, tensor = config.model.heads, config.parallel.tensor
    return next((n for n in fitting_heads(config) if n > heads), -(-heads // tensor) * tensor)


def next_hidden(config: RunConfig) -> int:
    """Return the next larger model.hidden that passes the other rules with model.heads."""
    model, tensor = config.model, config.parallel.tensor
    first = -(-model.hidden // model.heads)
    widths = range(first, first + 64 * tensor)
    has_own_ffn = model.ffn != 4 * model.hidden
    return model.heads * next(
        (
            width
            for width in widths
            if _rotates(model, width) and (has_own_ffn or 4 * width * model.heads % tensor == 0)
        ),
        first,
    )


def fitting_heads(config: RunConfig) -> list[int]:
    """Return the numbers of heads that divide model.hidden and pass the other rules."""
    model = config.model
    kv_heads = 1 if model.kv_heads == model.heads else model.kv_heads
    step = math.lcm(config.parallel.tensor, kv_heads)
    return [
        heads
        for heads in range(step, model.hidden + 1, step)
        if model.hidden % heads == 0 and _rotates(model, model.hidden // heads)
    ]


def _rotates(model: ModelConfig, head_dim: int) -> bool:
    """Return whether heads of this width have an even number of rotated dimensions, if any."""
    rotated = int(head_dim * model.rotary_fraction)
    return model.positions != "rotary" or is_rotatable(rotated)


def is_rotatable(dimensions: int) -> bool:
    """Return whether so many dimensions of a head can be rotated, which is done in pairs."""
    return dimensions >= 2 and dimensions % 2 == 0
