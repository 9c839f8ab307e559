"""The types that the features exchange: what a parameter is, seen without its framework.

`model` makes `ParameterRecord`s, `sharding` partitions them, `checkpoint` names them on disk.
None of the three imports another.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Placement:
    """Where a box of a global tensor lies inside a local parameter.

    Every element of a local parameter that no placement covers is padding: zero, never stored.
    """

    name: str
    """Global name (geometry/inventory.py)."""
    global_shape: tuple[int, ...]
    """Shape of the whole tensor, without padding."""
    global_start: tuple[int, ...]
    """First index of the box in the whole tensor, one number a dim."""
    local_start: tuple[int, ...]
    """First index of the box in the local parameter."""
    shape: tuple[int, ...]
    """Extent of the box."""

    def local_view(self, local: torch.Tensor) -> torch.Tensor:
        """Return the box as a view of the local parameter (or of anything of its shape)."""
        for dim, (start, length) in enumerate(zip(self.local_start, self.shape, strict=True)):
            local = local.narrow(dim, start, length)
        return local

    def global_view(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the box as a view of the whole tensor."""
        for dim, (start, length) in enumerate(zip(self.global_start, self.shape, strict=True)):
            whole = whole.narrow(dim, start, length)
        return whole


@dataclass(frozen=True, eq=False)
class ParameterRecord:
    """One trainable tensor of this rank, and all that its partitioning needs to know."""

    parameter: torch.nn.Parameter
    """The tensor the model computes with; its storage belongs to `sharding`."""
    unit: str
    """What it is gathered and reduced with: `embedding`, `positions`, `layers.N`, `head`."""
    placements: tuple[Placement, ...]
    """Where its parts lie in the global model."""
    decayed: bool
    """Whether weight decay applies."""
    counted: bool
    """Whether this rank counts it in the global norm and saves it: exactly one of the ranks that
    hold the same elements of one replica does."""
    tensor_partial: bool
    """Whether each tensor rank has only its sequence part's gradient (sequence parallel norms and
    biases), so that the tensor group must still add them up."""
    tied: bool
    """Whether other pieces of the pipeline hold copies, whose gradients must be added."""

    @property
    def name(self) -> str:
        """Global name of its first part: for messages."""
        return self.placements[0].name


@dataclass(frozen=True, eq=False)
class StateShard:
    """What one rank holds of one parameter's optimizer states: a run of its elements."""

    record: ParameterRecord
    """The parameter."""
    start: int
    """First element of the run in the flattened local parameter."""
    master: torch.Tensor
    """[elements] fp32, the weights."""
    exp_avg: torch.Tensor
    """[elements] fp32, first moments."""
    exp_avg_sq: torch.Tensor
    """[elements] fp32, second moments."""
