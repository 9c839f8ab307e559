"""Sums the numbers that all ranks must agree on after a step, in one small all-reduce."""

import torch
import torch.distributed as dist

from frontier_llm.collectives.primitives import all_reduce
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.geometry.wire import Sent

SCALARS = ("squared_norm", "loss_sum", "samples", "digest", "stop", "checkpoint")
COLLECTIVES = (
    "gather_params", "reduce_grads", "reduce_states", "refresh_params", "sequence_norms",
    "tied_copies", "tensor", "pipeline", "totals",
)  # fmt: skip
ENCODED = COLLECTIVES[:4]
"""Collectives that can be quantised."""


class Totals:
    """Sums over all ranks. All ranks get the same sums, so all ranks make the same decisions."""

    def __init__(self, device: torch.device, traffic: Traffic) -> None:
        self._device, self._traffic = device, traffic

    def reduce(
        self, share: dict[str, float | torch.Tensor]
    ) -> tuple[dict[str, float], dict[str, Sent], dict[str, Sent]]:
        """Add up the shares of all ranks.

        Collective over all ranks; waits for the device.

        Args:
            share: this rank's addend of each of `SCALARS`.

        Returns:
            The sums; the bytes that all ranks sent since the last call, by collective (the bytes
            of this all-reduce count in the next call); and the bytes that quantised collectives
            would have sent in the compute format.
        """
        sent, unquantised = self._traffic.take(), self._traffic.take_unquantised()
        unknown = set(sent) - set(COLLECTIVES)
        assert not unknown, f"collectives that are not in COLLECTIVES: {unknown}"
        scalars = [torch.as_tensor(share[name], dtype=torch.float64) for name in SCALARS]
        by_link = [sent.get(name, Sent()) for name in COLLECTIVES]
        by_link += [unquantised.get(name, Sent()) for name in ENCODED]
        volumes = torch.tensor([[s.intra, s.inter] for s in by_link], dtype=torch.float64)
        vector = torch.cat(
            [torch.stack([s.to(self._device) for s in scalars]), volumes.flatten().to(self._device)]
        )
        group = dist.group.WORLD
        assert group is not None
        all_reduce(vector, group, self._traffic, "totals").wait()
        numbers = vector.tolist()
        sums = dict(zip(SCALARS, numbers, strict=False))
        rest = iter(numbers[len(SCALARS) :])
        sent = {name: Sent(next(rest), next(rest)) for name in COLLECTIVES}
        unquantised = {name: Sent(next(rest), next(rest)) for name in ENCODED}
        saved = {name: one for name, one in unquantised.items() if one != sent[name]}
        return sums, sent, saved
