"""Sums the numbers that all ranks must agree on after a step, in one small all-reduce."""

import torch
import torch.distributed as dist

from frontier_llm.collectives.primitives import all_reduce
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.geometry.wire import Sent

SCALARS = ("squared_norm", "loss_sum", "samples", "digest", "stop", "checkpoint")
"""Names of the numbers that are summed; trainer/step.py computes each rank's addends."""
COLLECTIVES = (
    "gather_params", "reduce_grads", "reduce_states", "refresh_params", "sequence_norms",
    "tied_copies", "tensor", "pipeline", "totals",
)  # fmt: skip
"""Names of the collectives whose bytes are counted."""
QUANTISABLE = COLLECTIVES[:4]
"""Collectives that can be quantised."""


class Totals:
    """Sums numbers over all ranks. All ranks get the same sums, so they make the same decisions."""

    def __init__(self, device: torch.device, traffic: Traffic) -> None:
        self._device, self._traffic = device, traffic

    def reduce(
        self, addends: dict[str, float | torch.Tensor]
    ) -> tuple[dict[str, float], dict[str, Sent], dict[str, Sent]]:
        """Sum the addends of all ranks.

        Collective over all ranks; waits for the device.

        Args:
            addends: this rank's addend for each name in `SCALARS`.

        Returns:
            Three values: the sums, by name; the bytes that all ranks have sent since the last call,
            by collective; and the bytes that quantised collectives would have sent in the compute
            precision, by collective. The bytes of this all-reduce count in the next call.
        """
        sent, unquantised = self._traffic.take(), self._traffic.take_unquantised()
        unknown = set(sent) - set(COLLECTIVES)
        assert not unknown, f"collectives that are not in COLLECTIVES: {unknown}"
        scalars = [torch.as_tensor(addends[name], dtype=torch.float64) for name in SCALARS]
        by_link = [sent.get(name, Sent()) for name in COLLECTIVES]
        by_link += [unquantised.get(name, Sent()) for name in QUANTISABLE]
        volumes = torch.tensor([[s.intra, s.inter] for s in by_link], dtype=torch.float64)
        vector = torch.cat(
            [torch.stack([s.to(self._device) for s in scalars]), volumes.flatten().to(self._device)]
        )
        group = dist.group.WORLD
        assert group is not None
        all_reduce(vector, group, self._traffic, "totals").wait()
        numbers = vector.tolist()
        sums = dict(zip(SCALARS, numbers, strict=False))
        byte_counts = iter(numbers[len(SCALARS) :])
        sent = {name: Sent(next(byte_counts), next(byte_counts)) for name in COLLECTIVES}
        as_if = {name: Sent(next(byte_counts), next(byte_counts)) for name in QUANTISABLE}
        unquantised = {name: volume for name, volume in as_if.items() if volume != sent[name]}
        return sums, sent, unquantised
