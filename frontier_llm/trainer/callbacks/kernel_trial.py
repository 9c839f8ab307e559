"""Decides in the first steps whether compiled functions are faster than uncompiled ones.

The gain of torch.compile depends on the model, the device and the version of torch. With
`kernels=fastest` functions of the layers run compiled in the first steps, then uncompiled for as
many steps, and the run continues with the faster ones. Both compute the same numbers up to
rounding.
"""

import logging

import torch
import torch.distributed as dist

from frontier_llm.trainer.callbacks.callback import Callback, StepEnd
from frontier_llm.trainer.context import TrainerContext

_LOG = logging.getLogger(__name__)
STEPS = 3
"""Number of steps with compiled functions, and of steps without. The first step of each kind is not
measured. In the first step of the run the functions are compiled; the watchdog allows more time for
it."""


class KernelTrial(Callback):
    """Measures both kinds of functions if `kernels` asks for it; collective over all ranks.

    All ranks use the times of rank 0, because they must make the same decision.
    """

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self._is_on = context.hardware.kernels.on_trial
        self._device = context.hardware.accelerator.device
        self._seconds: list[float] = []
        if self._is_on:
            # a function that cannot be compiled here runs uncompiled, and torch logs why with
            # pages of traceback: those of one rank are enough
            torch._dynamo.config.suppress_errors = True
            if context.world.rank:
                logging.getLogger("torch._dynamo").setLevel(logging.ERROR)

    def on_step_begin(self, step: int) -> None:
        """Run uncompiled functions from the fourth step on."""
        if self._is_on and len(self._seconds) == STEPS:
            torch.compiler.set_stance("force_eager")

    def on_step_end(self, end: StepEnd) -> None:
        """Record the time of the step; after the sixth step, decide."""
        if not self._is_on:
            return
        self._seconds.append(end.metrics.step_seconds)
        if len(self._seconds) == 2 * STEPS:
            self._is_on = False
            compiled, uncompiled = self._times_of_rank_0()
            torch.compiler.set_stance("default" if compiled < uncompiled else "force_eager")
            if self.context.world.rank == 0:
                _LOG.info(
                    "%-10s a step with compiled functions takes %.2f of the time, so they are %s",
                    "kernels",
                    compiled / uncompiled,
                    "used" if compiled < uncompiled else "not used",
                )

    def close(self) -> None:
        """Let torch.compile work as usual in what this process does next."""
        if self.context.hardware.kernels.on_trial:
            torch.compiler.set_stance("default")
            torch._dynamo.config.suppress_errors = False

    def _times_of_rank_0(self) -> list[float]:
        """Return the seconds of the fastest step with compiled functions, and without."""
        measured = self._seconds[1:STEPS], self._seconds[STEPS + 1 :]
        times = torch.tensor([min(times) for times in measured], dtype=torch.float64)
        times = times.to(self._device)
        dist.broadcast(times, src=0)
        return list(times.tolist())
