"""The interface of an optimizer on the intervals of this rank, and the choice of one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from frontier_llm.collectives.transport import Transport
from frontier_llm.geometry.partition import Interval
from frontier_llm.protocols import State, StateShard
from frontier_llm.sharding.adafactor import Adafactor
from frontier_llm.sharding.adamw import AdamW
from frontier_llm.sharding.adamw_8bit import AdamW8bit
from frontier_llm.sharding.matrix_gather import MatrixGather
from frontier_llm.sharding.muon import Muon
from frontier_llm.sharding.unit import StateGroups, Unit
from frontier_llm.sharding.update_groups import UpdateRule


class Optimizer(Protocol):
    """The optimizer states of this rank, and their update.

    In shapes, n is the number of elements of a unit's flat buffer, and o the number of ranks over
    which its optimizer states are divided.
    """

    @property
    def masters(self) -> Sequence[torch.Tensor]:
        """Per unit, [n / o] fp32: the master weights. They are the parameters or a copy."""

    def states_of(self, index: int, interval: Interval) -> Mapping[str, State]:
        """Return the states of an interval of the buffer of unit `index`, by name.

        The interval lies in the optimizer interval of this rank, and inside one parameter. Each
        state has [elements], the first is `master`. Checkpoints store the states under these names,
        in this order.
        """

    def writable_states_of(self, index: int, interval: Interval) -> Mapping[str, State]:
        """Return fp32 tensors in place of `states_of`, which the caller may overwrite.

        `resume` must follow: it encodes what the caller has written.
        """

    def more_shards(self) -> Iterator[StateShard]:
        """Yield states that do not belong to single elements of the parameters, for checkpoints."""

    @property
    def moment_bytes(self) -> int:
        """Bytes of all states but the master weights."""

    @property
    def saved_bytes(self) -> int:
        """Bytes of all states in a checkpoint, padding included."""

    @property
    def has_separate_masters(self) -> bool:
        """Whether master weights are stored in addition to the parameters."""

    def update(
        self,
        learning_rate: float,
        gradient_divisor: torch.Tensor,
        skip: torch.Tensor | None = None,
    ) -> None:
        """Update all states. `write_parameters` must follow, unless the update is skipped.

        Args:
            learning_rate: learning rate of this step.
            gradient_divisor: [] fp32 on the device; gradients are divided by it first.
            skip: [] fp32 on the device; if 1, nothing changes. None: 0.
        """

    def resume(self, updates: int) -> None:
        """Continue from states that the caller has overwritten.

        May be collective over the ranks that hold parts of the same units.

        Args:
            updates: number of updates in these states.
        """

    def write_parameters(self) -> None:
        """Write this rank's interval of the parameters from the masters."""

    def read_parameters(self, index: int, interval: Interval) -> None:
        """Write an interval of the masters of unit `index` from its parameters."""


def make_optimizer(
    units: Sequence[Unit],
    gradients: Sequence[torch.Tensor],
    rule: UpdateRule,
    groups: StateGroups,
    transport: Transport,
    *,
    separate_masters: bool,
) -> Optimizer:
    """Return the optimizer that the rule names.

    Args:
        units: the trainable units.
        gradients: per unit, [n / o] fp32; updates read them and overwrite them.
        rule: constants of the update rule.
        groups: the groups of ranks over which states are divided.
        transport: counts the bytes that are sent.
        separate_masters: whether master weights are a copy even if the parameters are fp32.
    """
    traffic = transport.traffic

    def muon() -> Muon:
        gather = MatrixGather(groups.tensor_group, traffic, pairwise=transport.pairwise)
        return Muon(units, gradients, rule, gather, separate_masters)

    make: dict[str, Callable[[], Optimizer]] = {
        "adamw": lambda: AdamW(units, gradients, rule, separate_masters),
        "adamw_8bit": lambda: AdamW8bit(units, gradients, rule, separate_masters),
        "muon": muon,
        "adafactor": lambda: Adafactor(units, gradients, rule, groups, traffic, separate_masters),
    }
    return make[rule.name]()


def keeps_whole(rule: UpdateRule) -> bool:
    """Whether the optimizer that the rule names needs whole matrices of layers on a rank."""
    return rule.name == "muon"


def allocated_bytes(optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes that the states of a rank allocate: `master` and `moments`.

    Master weights that are the parameters count as 0.
    """
    master = sum(tensor.nbytes for tensor in optimizer.masters)
    return {
        "master": master if optimizer.has_separate_masters else 0,
        "moments": optimizer.moment_bytes,
    }
