"""AdamW on flat fp32 buffers: master weights and moments, updated by torch's fused kernel.

Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv:1711.05101).
"""

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from frontier_llm.config.optimizer import OptimizerConfig
from frontier_llm.sharding.flat_buffer import FlatUnit


class AdamW:
    """The optimizer states of all units of a rank.

    Where the model computes in fp32 the parameters are the master weights: no copy is kept.

    Attributes:
        masters: a unit each, [n] fp32.
        exp_avgs: a unit each, [n] fp32, first moments.
        exp_avg_sqs: a unit each, [n] fp32, second moments.
    """

    def __init__(self, units: Sequence[FlatUnit], config: OptimizerConfig) -> None:
        self._units, self._config = units, config
        self.masters = [unit.parameters.float() for unit in units]  # fp32: the same storage
        self.exp_avgs = [torch.zeros_like(master) for master in self.masters]
        self.exp_avg_sqs = [torch.zeros_like(master) for master in self.masters]
        self._steps = [torch.zeros((), device=m.device) for m in self.masters for _ in range(2)]

    def step(self, learning_rate: float, gradient_divisor: torch.Tensor) -> None:
        """Update masters and moments, then write the parameters.

        Args:
            learning_rate: of this step.
            gradient_divisor: [] fp32 on the device; gradients are divided by it first (loss
                scale and clipping in one).
        """
        for decays, decay in ((True, self._config.weight_decay), (False, 0.0)):
            self._update(decays, decay, learning_rate, gradient_divisor)
        for unit, master in zip(self._units, self.masters, strict=True):
            if master is not unit.parameters:
                unit.parameters.copy_(master)

    def _update(
        self, decays: bool, weight_decay: float, learning_rate: float, divisor: torch.Tensor
    ) -> None:
        gradients = [unit.gradients for unit in self._units]
        adamw(
            self._part(self.masters, decays),
            self._part(gradients, decays),
            self._part(self.exp_avgs, decays),
            self._part(self.exp_avg_sqs, decays),
            max_exp_avg_sqs=[],
            state_steps=self._steps[0 if decays else 1 :: 2],
            fused=True,
            grad_scale=divisor,
            amsgrad=False,
            beta1=self._config.beta1,
            beta2=self._config.beta2,
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=self._config.epsilon,
            maximize=False,
        )

    def _part(self, buffers: Sequence[torch.Tensor], decays: bool) -> list[torch.Tensor]:
        """Take the decayed or the undecayed range of each unit's buffer."""
        return [
            buffer[: unit.layout.decayed] if decays else buffer[unit.layout.decayed :]
            for unit, buffer in zip(self._units, buffers, strict=True)
        ]
