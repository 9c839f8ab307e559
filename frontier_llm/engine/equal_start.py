"""Checks that all ranks start from equal parameters."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from frontier_llm.errors import ConfigError
from frontier_llm.protocols import ParameterRecord


def check_equal_start(records: Sequence[ParameterRecord]) -> None:
    """Compare the sum and the norm of each parameter over all ranks. Collective over all ranks.

    Raises:
        ConfigError: a parameter differs.
    """
    with torch.no_grad():
        numbers = torch.stack(
            [
                torch.stack(
                    [
                        value.sum(dtype=torch.float64),
                        torch.linalg.vector_norm(value, dtype=torch.float64),
                    ]
                )
                for value in (record.parameter.detach() for record in records)
            ]
        ).nan_to_num(1.0, 2.0, 3.0)
    extremes = torch.cat([numbers, -numbers])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    highest, lowest = extremes.chunk(2)
    differs = (highest != -lowest).any(dim=1).tolist()
    if any(differs):
        name = records[differs.index(True)].name
        raise ConfigError(
            "module",
            f"{sum(differs)} of {len(records)} parameters that differ between ranks, first {name}",
            "equal parameters on all ranks",
            "call torch.manual_seed with the same number on all ranks before the module is built, "
            "or broadcast the parameters of rank 0",
        )
