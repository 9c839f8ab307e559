"""The process groups along which model states are gathered and added up."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from frontier_llm.geometry.partition import Factors


@dataclass(frozen=True)
class StateGroups:
    """Groups of this rank, one a digit of its data rank; None where the digit has one value."""

    factors: Factors
    data_rank: int
    a: dist.ProcessGroup | None
    """Holders of the other parts of the parameters."""
    b: dist.ProcessGroup | None
    """Within one part of the parameters, holders of the other parts of its gradients."""
    c: dist.ProcessGroup | None
    """Within one part of the gradients, holders of the other parts of the optimizer states."""
    d: dist.ProcessGroup | None
    """Holders of the same optimizer states: replicas."""
    tensor: dist.ProcessGroup
    """Ranks that cut the same matrices: for partial gradients under sequence parallel."""
    tied: Mapping[str, dist.ProcessGroup | None]
    """Stages that hold copies of a parameter, by its name; None where this stage holds all."""

    @property
    def replicas(self) -> int:
        """How many ranks hold the same optimizer interval."""
        return self.factors.data // self.factors.optimizer
