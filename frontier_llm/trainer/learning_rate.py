"""The learning rate of each step."""

import math
from dataclasses import dataclass

from frontier_llm.config.optimizer import CooldownShape, Schedule
from frontier_llm.config.run import RunConfig


@dataclass(frozen=True)
class LearningRate:
    """A linear warm-up, then one of the schedules that docs/optimizer.md defines.

    The rate depends on nothing but the step, so a resumed run continues with the same rates.

    Sources: cosine, without restarts: Loshchilov and Hutter (arXiv:1608.03983); wsd (warm-up,
    stable, decay): MiniCPM (arXiv:2404.06395, section 4), its form 1-sqrt: Hägele et al.
    (arXiv:2405.18392); inverse_sqrt: Vaswani et al. (arXiv:1706.03762, section 5.3), and
    without a warm-up T5 (arXiv:1910.10683, section 3.1.2).
    """

    peak: float
    minimum: float
    """Learning rate at the end of the schedule; `inverse_sqrt` does not fall below it."""
    warmup_steps: int
    decay_steps: int
    """Step at which `cosine`, `linear` and `wsd` reach the minimum, counted from the start of the
    run."""
    schedule: Schedule = "cosine"
    cooldown_steps: int = 1
    """Number of steps before `decay_steps` in which `wsd` falls."""
    cooldown_shape: CooldownShape = "1-sqrt"
    timescale_steps: int = 1
    """Step from which on `inverse_sqrt` falls."""

    @classmethod
    def of(cls, config: RunConfig) -> "LearningRate":
        """Return the schedule of a run."""
        optimizer = config.optimizer
        return cls(
            peak=optimizer.learning_rate,
            minimum=optimizer.minimum_learning_rate,
            warmup_steps=optimizer.warmup_steps,
            decay_steps=config.decay_steps,
            schedule=optimizer.schedule,
            cooldown_steps=config.cooldown_steps,
            cooldown_shape=optimizer.cooldown_shape or "1-sqrt",
            timescale_steps=optimizer.timescale_steps or max(1, optimizer.warmup_steps),
        )

    def __call__(self, step: int) -> float:
        """Return the learning rate of step number `step`, counted from 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        if self.schedule == "inverse_sqrt":
            falling = self.peak * math.sqrt(self.timescale_steps / max(step, self.timescale_steps))
            return max(self.minimum, falling)
        if step >= self.decay_steps:
            return self.minimum
        fraction = max(0.0, (step - self.decay_start) / (self.decay_steps - self.decay_start))
        return self.minimum + (self.peak - self.minimum) * self._remaining(fraction)

    @property
    def decay_start(self) -> int:
        """Last step with the peak rate."""
        if self.schedule == "inverse_sqrt":
            return self.timescale_steps
        is_stable = self.schedule == "wsd"
        return self.decay_steps - self.cooldown_steps if is_stable else self.warmup_steps

    def milestones(self, steps: int) -> list[int]:
        """Return the steps at which the form of the schedule changes, in a run of `steps`."""
        found = {1, self.warmup_steps, steps}
        if self.schedule != "constant":
            found.add(self.decay_start)
        if self.schedule not in ("constant", "inverse_sqrt"):
            found.add(self.decay_steps)
        return sorted(step for step in found if 1 <= step <= steps)

    def describe(self, steps: int) -> str:
        """Return the name of the schedule and its rates at its milestones in a run of `steps`."""
        rates = (f"{self(step):.3g} at step {step}" for step in self.milestones(steps))
        return f"{self.schedule}: {', '.join(rates)}"

    def _remaining(self, fraction: float) -> float:
        """Return the share of the way from minimum to peak after a fraction, 0 to 1, of a decay."""
        linear = 1 - fraction
        cosine = (1 + math.cos(math.pi * fraction)) / 2
        wsd = {"linear": linear, "1-sqrt": 1 - math.sqrt(fraction)}[self.cooldown_shape]
        return {"linear": linear, "cosine": cosine, "wsd": wsd}[self.schedule]
