"""AdamW on fp32 intervals: master weights and moments, updated by torch's fused kernel.

Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv:1711.05101).
"""

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from frontier_llm.config.optimizer import OptimizerConfig
from frontier_llm.sharding.unit import Unit


class AdamW:
    """The optimizer states of this rank: n/o elements of each unit.

    Where the model computes in fp32 the parameters' shards are the master weights: no copy is
    kept, unless what is refreshed is rounded on its way.

    Attributes:
        masters: a unit each, [n / o] fp32.
        exp_avgs: a unit each, [n / o] fp32, first moments.
        exp_avg_sqs: a unit each, [n / o] fp32, second moments.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        gradients: Sequence[torch.Tensor],
        config: OptimizerConfig,
        *,
        own_masters: bool = False,
    ) -> None:
        """Make the states.

        Args:
            units: the trainable ones.
            gradients: a unit each, [n / o] fp32; read in `step`, and divided in place.
            config: the rule's constants.
            own_masters: whether masters are kept beside parameters even of fp32.
        """
        self._units, self._gradients, self._config = units, gradients, config
        self._parameters = [unit.shard_part(unit.optimizer) for unit in units]
        self.masters = [
            parameters.to(torch.float32, copy=own_masters) for parameters in self._parameters
        ]
        self.exp_avgs = [torch.zeros_like(master) for master in self.masters]
        self.exp_avg_sqs = [torch.zeros_like(master) for master in self.masters]
        self._steps = {
            decays: [torch.zeros((), device=master.device) for master in self.masters]
            for decays in (True, False)
        }

    @property
    def own_masters(self) -> bool:
        """Whether masters are kept beside the parameters."""
        return any(m is not p for m, p in zip(self.masters, self._parameters, strict=True))

    def step(self, learning_rate: float, gradient_divisor: torch.Tensor) -> None:
        """Update masters and moments, then write this rank's interval of the parameters.

        Args:
            learning_rate: of this step.
            gradient_divisor: [] fp32 on the device; gradients are divided by it first (loss
                scale and clipping in one).
        """
        for decays, decay in ((True, self._config.weight_decay), (False, 0.0)):
            self._update(decays, decay, learning_rate, gradient_divisor)
        self._write_parameters()

    def resume(self, updates: int) -> None:
        """Go on from masters and moments that were overwritten from outside.

        Args:
            updates: `step`s that they have seen: decides the moments' bias correction.
        """
        for counters in self._steps.values():
            for counter in counters:
                counter.fill_(updates)
        self._write_parameters()

    def _write_parameters(self) -> None:
        for master, parameters in zip(self.masters, self._parameters, strict=True):
            if master is not parameters:
                parameters.copy_(master)

    def _update(
        self, decays: bool, weight_decay: float, learning_rate: float, divisor: torch.Tensor
    ) -> None:
        masters = self._range(self.masters, decays)
        here = [index for index, master in enumerate(masters) if master.numel()]

        def nonempty(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [tensors[index] for index in here]

        if not here:
            return
        adamw(
            nonempty(masters),
            nonempty(self._range(self._gradients, decays)),
            nonempty(self._range(self.exp_avgs, decays)),
            nonempty(self._range(self.exp_avg_sqs, decays)),
            max_exp_avg_sqs=[],
            state_steps=nonempty(self._steps[decays]),
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

    def _range(self, tensors: Sequence[torch.Tensor], decays: bool) -> list[torch.Tensor]:
        """Take the decayed or the undecayed range of each unit's interval; it may be empty."""
        ranges = []
        for unit, tensor in zip(self._units, tensors, strict=True):
            border = min(max(unit.layout.decayed - unit.optimizer.start, 0), tensor.numel())
            ranges.append(tensor[:border] if decays else tensor[border:])
        return ranges
