"""Types that model, sharding and checkpoint exchange, so that none of them imports another.

`model` makes a `ParameterRecord` per parameter, `sharding` partitions the parameters, `checkpoint`
saves them under their global names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from frontier_llm.collectives.handles import Handle
from frontier_llm.config.optimizer import ParameterGroup


class ProductSink(Protocol):
    """Takes the gradient of a weight [out, in] as two operands.

    The operands are the gradient of the outputs and the inputs. The weight's gradient is the
    product of the first, transposed, and the second. The sink computes this product in the buffer
    that needs it, so that autograd makes no tensor for it.
    """

    @property
    def is_deferring(self) -> bool:
        """Whether the sink keeps the operands of this backward pass and multiplies them later."""

    def __call__(
        self,
        grad_outputs: torch.Tensor,
        inputs: torch.Tensor,
        gather: Callable[[torch.Tensor], tuple[torch.Tensor, Handle]] | None = None,
    ) -> None:
        """Take the operands. The caller must not write to them afterwards.

        Args:
            grad_outputs: [tokens, out].
            inputs: [tokens, in]; with `gather` only the tokens of this rank.
            gather: only for a sink that is deferring: starts to gather the inputs of all tokens
                from the tensor-parallel ranks, and returns them and what to wait for.
        """


def set_product_sink(weight: torch.nn.Parameter, sink: ProductSink) -> None:
    """Give a weight the sink of its gradient; `sharding` calls this."""
    weight.product_sink = sink  # type: ignore[attr-defined]


def product_sink(weight: torch.Tensor) -> ProductSink | None:
    """Return the sink of a weight's gradient; None if autograd must compute the gradient.

    A module that uses the sink must be the only reader of the weight, once per forward pass,
    because the sink takes their product for the whole gradient of the weight in this backward pass.
    """
    sink: ProductSink | None = getattr(weight, "product_sink", None)
    return sink


@dataclass(frozen=True)
class UnitReader:
    """A module, and all units whose parameters its forward pass reads."""

    module: torch.nn.Module
    units: tuple[str, ...]
    """Names of the units."""
    in_backward: bool = True
    """Whether the module's backward pass reads these parameters too. The backward pass of a table
    look-up does not."""
    release: Literal["always", "without_grad", "never"] = "always"
    """After which forward passes the units are freed; `without_grad`: those that autograd does not
    record."""


@dataclass(frozen=True)
class Placement:
    """Places a box of a global tensor inside a local parameter.

    Elements of a local parameter that no placement covers are padding: they are zero and are not
    saved.
    """

    name: str
    """Name of the global tensor (geometry/inventory.py)."""
    global_shape: tuple[int, ...]
    """Shape of the global tensor, without padding."""
    global_start: tuple[int, ...]
    """First index of the box in the global tensor, one number per dim."""
    local_start: tuple[int, ...]
    """First index of the box in the local parameter, one number per dim."""
    shape: tuple[int, ...]
    """Shape of the box."""

    def local_view(self, local: torch.Tensor) -> torch.Tensor:
        """Return the box as a view of the local parameter, or of a tensor of the same shape."""
        for dim, (start, length) in enumerate(zip(self.local_start, self.shape, strict=True)):
            local = local.narrow(dim, start, length)
        return local


@dataclass(frozen=True, eq=False)
class ParameterRecord:
    """A parameter of this rank, with what sharding and checkpoints need to know of it."""

    parameter: torch.nn.Parameter
    """The tensor that the model computes with; `sharding` owns its storage."""
    unit: str
    """Unit that it is gathered and reduced with: `embedding`, `positions`, `layers.N`, `head`."""
    placements: tuple[Placement, ...]
    """Its parts in the global model."""
    group: ParameterGroup
    """The group for which weight decay and the learning rate can be set."""
    counted: bool
    """Whether this rank counts it in the gradient norm and saves it. Of the ranks of a replica that
    hold the same elements, exactly one does."""
    tensor_partial: bool
    """Whether its gradient must be summed over the tensor group, because each tensor rank has seen
    only a part of the sequence (norms and biases under sequence parallelism) or only some of the
    heads (norms of single heads)."""
    tied: bool
    """Whether other model chunks hold copies, whose gradients must be added."""
    tensor_dim: int | None = None
    """The dim that tensor parallelism divides; None = each tensor rank has the whole parameter."""
    fused: tuple[int, ...] = ()
    """Rows of each of the matrices that it fuses, in one group of rows; groups follow each other.
    Query, key and value have a group per head of keys. Empty: it is one matrix."""
    rate_factor: float = 1.0
    """Factor of its learning rate that follows from the width of the model (muP). Weight decay is
    divided by it."""
    weight_decay: float | None = None
    """Its weight decay, which the learning rate multiplies; None = that of its group."""
    passes: int = 1
    """Number of backward passes per micro-batch that compute a gradient of it: the number of this
    rank's model chunks that read it."""

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, which may be quantised, and not a norm or a bias."""
        return self.group != "norms"

    @property
    def is_matrix_of_layer(self) -> bool:
        """Whether it is one or several matrices of a layer, which Muon updates as a whole."""
        return self.group == "matrices" and self.parameter.dim() == 2

    @property
    def name(self) -> str:
        """Global name of its first part, for messages."""
        return self.placements[0].name


class EncodedValues(Protocol):
    """Values of an optimizer state that are not kept in fp32; a part of it is a slice."""

    dtype: torch.dtype
    """Dtype of the decoded values, fp32."""

    @property
    def device(self) -> torch.device:
        """Device of the encoded values."""

    def numel(self) -> int:
        """Return the number of elements."""

    def data_ptr(self) -> int:
        """Return the address of the encoded values."""

    def __getitem__(self, part: slice) -> "EncodedValues":
        """Return a part of the values."""

    def decode(self) -> torch.Tensor:
        """Return [elements] fp32: the values."""


State = torch.Tensor | EncodedValues
"""[elements] of an optimizer state: fp32, or values that decode to it; frozen: in its own dtype."""


@dataclass(frozen=True, eq=False)
class StateShard:
    """The optimizer states that one rank holds of a parameter: a contiguous range of elements.

    States that do not belong to single elements of a parameter have a record of their own, whose
    parameter has only a shape, and no master weights.
    """

    record: ParameterRecord
    """The parameter."""
    start: int
    """First element of the range in the flattened local parameter."""
    states: Mapping[str, State]
    """[elements] by the name of the state, in the order in which files store them as fp32."""

    @property
    def elements(self) -> int:
        """Number of elements of the range."""
        return next(iter(self.states.values())).numel()

    @property
    def master(self) -> torch.Tensor:
        """[elements] fp32, the master weights."""
        master = self.states["master"]
        assert isinstance(master, torch.Tensor)
        return master

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The states of a shard in which none is encoded, so that they can be overwritten."""
        return {name: s for name, s in self.states.items() if isinstance(s, torch.Tensor)}
