"""The numbers that all ranks must agree on after a step, in one small all-reduce."""

import torch
import torch.distributed as dist

from frontier_llm.collectives.reduce import all_reduce
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.geometry.wire import Sent

SCALARS = ("squared_norm", "loss_sum", "samples", "stop")
COLLECTIVES = (
    "gather_params", "reduce_grads", "reduce_states", "refresh_params", "sequence_norms",
    "tied_embedding", "tensor", "pipeline", "totals",
)  # fmt: skip


class Totals:
    """Sums over all ranks; since every rank has the same sums, every rank decides the same."""

    def __init__(self, device: torch.device, traffic: Traffic) -> None:
        self._device, self._traffic = device, traffic

    def reduce(
        self, share: dict[str, float | torch.Tensor]
    ) -> tuple[dict[str, float], dict[str, Sent]]:
        """Add up each rank's share.

        Collective over all ranks; waits for the device.

        Args:
            share: this rank's part of each of `SCALARS`.

        Returns:
            The sums, and the bytes that all ranks sent since the last call by collective. (Those
            of this very all-reduce are counted in the next.)
        """
        sent = self._traffic.take()
        unknown = set(sent) - set(COLLECTIVES)
        assert not unknown, f"collectives without a name in COLLECTIVES: {unknown}"
        scalars = [torch.as_tensor(share[name], dtype=torch.float64) for name in SCALARS]
        by_link = [sent.get(name, Sent()) for name in COLLECTIVES]
        volumes = torch.tensor([[s.intra, s.inter] for s in by_link], dtype=torch.float64)
        vector = torch.cat(
            [torch.stack([s.to(self._device) for s in scalars]), volumes.flatten().to(self._device)]
        )
        group = dist.group.WORLD
        assert group is not None
        all_reduce(vector, group, self._traffic, "totals").wait()
        numbers = vector.tolist()
        sums = dict(zip(SCALARS, numbers, strict=False))
        intra, inter = numbers[len(SCALARS) :: 2], numbers[len(SCALARS) + 1 :: 2]
        return sums, {
            name: Sent(*by_link) for name, *by_link in zip(COLLECTIVES, intra, inter, strict=True)
        }
