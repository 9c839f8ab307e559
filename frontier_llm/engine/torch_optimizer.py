"""`Sharded.step` as an optimizer of torch, for trainers and schedulers that take one."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from frontier_llm.engine.lazy_checkpoints import Checkpoints
from frontier_llm.engine.shard_settings import number_of
from frontier_llm.engine.sharded import Sharded
from frontier_llm.errors import ConfigError


class Optimizer(torch.optim.Optimizer):
    """Updates the parameters of `Sharded` at the learning rate that a scheduler has written.

    Each group of `param_groups` has the parameters of one factor of the learning rate
    (`AdamW.groups`, `AdamW.rate_factors`). `state_dict` has no states: `Checkpoints` saves them.
    The betas are constant: `OneCycleLR` and `CyclicLR` need `cycle_momentum=False`.

    Args:
        sharded: what `shard` has returned.
        lr: learning rate of parameters whose factor is 1.
        checkpoints: if given, `step` tells `Sharded.step` whether they save the step.

    Attributes:
        norm: norm of the last gradient before it was clipped; nan before the first step.
    """

    def __init__(self, sharded: Sharded, lr: float, checkpoints: Checkpoints | None = None) -> None:
        self._sharded, self._checkpoints, self.norm = sharded, checkpoints, math.nan
        lr = number_of(lr)
        groups: dict[float, list[nn.Parameter]] = {}
        for factor, parameter in sharded.rate_factors():
            groups.setdefault(factor, []).append(parameter)
        named = [{"params": p, "lr": lr * factor, "factor": factor} for factor, p in groups.items()]
        super().__init__(named, {"lr": lr})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Return the result of `closure`, which is called first; then do `Sharded.step`.

        Raises a ConfigError if the learning rates of two groups have another ratio than their
        factors.
        """
        if closure is not None and not callable(closure):
            todo = "write step(): the learning rate is param_groups[0]['lr'], or a scheduler's"
            raise ConfigError("closure", repr(closure), "a function, or nothing", todo)
        with torch.enable_grad():
            loss = closure() if closure else None
        pairs = [(number_of(group["lr"]), group["factor"]) for group in self.param_groups]
        rate = next((lr / factor for lr, factor in pairs if factor), 0.0)
        for index, (lr, factor) in enumerate(pairs):
            if not math.isclose(lr, rate * factor, rel_tol=1e-6):
                wants = f"{rate * factor}, from the first group's rate and the factors of shard"
                do = "use one schedule for all groups, and the factors of ParameterGroup"
                raise ConfigError(f"param_groups[{index}]['lr']", lr, wants, do)
        saved = self._checkpoints is not None and self._checkpoints.is_due(self._sharded.next_step)
        self.norm = self._sharded.step(rate, saved=saved)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: a step begins with empty gradients. `Sharded.drop_step` discards them."""
