"""The learning rate of each step."""

import math
from dataclasses import dataclass

from frontier_llm.config.run import RunConfig


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up, then a cosine down to the minimum (arXiv:1608.03983, without restarts)."""

    peak: float
    """Learning rate at the end of the warm-up."""
    minimum: float
    """Learning rate from step `decay_steps` on."""
    warmup_steps: int
    """Number of steps in which the rate rises to the peak."""
    decay_steps: int
    """Step at which the rate reaches the minimum, counted from the start of the run."""

    @classmethod
    def of(cls, config: RunConfig) -> "LearningRate":
        """Return the schedule of a run."""
        optimizer = config.optimizer
        return cls(
            optimizer.learning_rate,
            optimizer.minimum_learning_rate,
            optimizer.warmup_steps,
            config.decay_steps,
        )

    def __call__(self, step: int) -> float:
        """Return the learning rate of step number `step`, counted from 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if step >= self.decay_steps:
            return self.minimum
        fraction = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return self.minimum + (self.peak - self.minimum) * (1 + math.cos(math.pi * fraction)) / 2
