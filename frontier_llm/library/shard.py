"""Shard the states of any torch module over the ranks of `torch.distributed`.

The factors say over how many ranks one copy of the parameters, of the gradients and of the
optimizer states is divided (AMSP, arXiv:2311.00257; geometry/partition.py).

Each layer of the module (an element of an `nn.ModuleList`) is a unit: it is gathered before its
forward and its backward pass, and freed afterwards. All other parameters are one more unit, which
stays gathered during the passes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from frontier_llm.collectives.kernel_choice import choose_kernels
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.collectives.transport import Transport
from frontier_llm.errors import ConfigError, TrainingError
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.grid_levels import level_borders
from frontier_llm.geometry.partition import Factors, Hop
from frontier_llm.geometry.wire import Sent
from frontier_llm.library.message_formats import Formats
from frontier_llm.library.module_units import REST, layers_of, records_of
from frontier_llm.library.update import AdamW
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.sharding.unit import StateGroups, Unit


def shard(
    module: nn.Module,
    *,
    params: int = 1,
    grads: int = 1,
    optimizer: int | None = None,
    formats: Formats = Formats.PLAIN,
    update: AdamW | None = None,
    micro_batches: int = 1,
    ranks_per_node: int | None = None,
) -> "Sharded":
    """Shard a module's parameters, gradients and optimizer states over all ranks.

    Collective over all ranks, which must hold equal parameters. The storage of the parameters is
    replaced.

    Args:
        module: on the device on which it trains, with parameters of one dtype.
        params: number of ranks over which one copy of the parameters is sharded.
        grads: the same for the gradients; a multiple of `params`.
        optimizer: the same for the optimizer states; a multiple of `grads` that divides the number
            of ranks; None = all ranks.
        formats: number formats in which states are sent.
        update: constants of the update; None = those of `AdamW()`.
        micro_batches: calls of `Sharded.backward` per step.
        ranks_per_node: neighbouring ranks that share a node; None = all ranks.

    Raises:
        ConfigError: a factor does not divide the next one, or parameters differ in dtype or device.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "torch.distributed",
            "not initialised",
            "a process group of all ranks",
            'call torch.distributed.init_process_group("gloo") or ("nccl") before shard',
        )
    size, rank = dist.get_world_size(), dist.get_rank()
    grid, update = Grid(1, size, 1, ranks_per_node or size), update or AdamW()
    factors = _factors(grid, params, grads, optimizer or size, formats)
    layers = layers_of(module)
    records = records_of(module, layers)
    parameter = records[0].parameter
    device, traffic = parameter.device, Traffic(grid, rank)
    state_formats = formats.at_each_step()
    transport = Transport(
        lambda step: state_formats,
        traffic,
        choose_kernels("auto", device),
        parameter.dtype,
        device,
        seed=rank << 16,
    )
    groups = StateGroups(factors, rank, _groups(factors, rank), _alone(rank, size), {})
    states = ShardedStates(
        records, groups, transport, update, feedback=formats.feedback(), fuse_gradients=False
    )
    return Sharded(module, layers, states, traffic, update, micro_batches)


class Sharded:
    """A module whose states are sharded.

    Attributes:
        module: the module, which is called as before.
        states: the sharded states, for `Checkpoints`.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Mapping[str, nn.Module],
        states: ShardedStates,
        traffic: Traffic,
        update: AdamW,
        micro_batches: int,
    ) -> None:
        """Attach the hooks that gather the parameters; `shard` calls this."""
        self.module, self.states = module, states
        self._traffic, self._update, self._micro_batches = traffic, update, micro_batches
        self._step, self._updates, self._passes = 0, 0, 0
        self._in_step = self._in_backward = False
        self._before_update: list[Callable[[], None]] = []
        self._rest = states.units([REST])
        module.register_forward_pre_hook(self._begin_forward)
        module.register_forward_hook(self._end_forward)
        for name, layer in layers.items():
            self._attach(layer, states.units([name]))

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a micro-batch.

        Args:
            loss: [] the mean loss of this rank's samples, which was computed in training mode.
        """
        self._passes += 1
        if self._passes > self._micro_batches:
            raise TrainingError(
                f"backward was called {self._passes} times in a step of {self._micro_batches} "
                "micro-batches: call step, or pass another number of micro_batches to shard"
            )
        self.states.acquire(self._rest, backward=True)
        self._in_backward = True
        try:
            (loss / (dist.get_world_size() * self._micro_batches)).backward()
        finally:
            self._in_backward = False

    def step(self, learning_rate: float, *, saved: bool = False) -> float:
        """Clip the gradients and update the parameters; nothing changes if one is not finite.

        Collective over all ranks.

        Args:
            learning_rate: learning rate of this step.
            saved: whether the states are saved after this step (`Checkpoints.is_due`), so that a
                run that continues from them repeats this run to the last digit.

        Returns:
            The norm of the gradient before it was clipped.

        Raises:
            TrainingError: `backward` was not called for each micro-batch.
        """
        if self._passes != self._micro_batches:
            raise TrainingError(
                f"step was called after {self._passes} of {self._micro_batches} calls of backward"
            )
        self.states.finish_backward()
        squared = self.states.squared_norm()
        dist.all_reduce(squared)
        norm, limit = squared.sqrt(), self._update.clip_norm
        divisor = (norm / limit).clamp(min=1.0) if limit else torch.ones_like(norm)
        skip = norm.isfinite().logical_not()
        for before_update in self._before_update:
            before_update()
        self.states.update(learning_rate, divisor.float(), skip.float())
        skipped = bool(skip.item())
        if skipped:
            self.states.skip()
        if saved or not skipped:
            self.states.refresh(saved=saved)
        self._updates += not skipped
        self._passes, self._in_step = 0, False
        return float(norm)

    def sent_bytes(self) -> dict[str, Sent]:
        """Return the bytes that this rank has sent since the last call, by collective and level."""
        return self._traffic.take()

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank keeps between steps, by category."""
        return self.states.memory_bytes()

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the full value of every parameter, gathered without quantisation.

        Collective over all ranks: all must exhaust the iterator.
        """
        for record, parameter in self.states.parameters():
            yield record.name, parameter

    def before_update(self, call: Callable[[], None]) -> None:
        """Call a function before each update, such as `Checkpoints`' wait for its copies."""
        self._before_update.append(call)

    def continue_from(self, step: int, updates: int) -> None:
        """Continue from states that the caller has overwritten; `Checkpoints.restore` calls this.

        Args:
            step: step that the states were saved after.
            updates: number of updates in them.
        """
        self._step, self._updates = step, updates
        self.states.adopt(updates, step)

    @property
    def updates(self) -> int:
        """Number of updates so far. Steps whose gradients were not finite made none."""
        return self._updates

    def _begin_forward(self, module: nn.Module, _: Any) -> None:
        if module.training and torch.is_grad_enabled() and not self._in_step:
            self._in_step = True
            self._step += 1
            self.states.begin_step(self._step, self._micro_batches)
        self.states.acquire(self._rest)

    def _end_forward(self, module: nn.Module, _: Any, __: Any) -> None:
        if not torch.is_grad_enabled():
            self.states.release(self._rest)

    def _attach(self, layer: nn.Module, units: Sequence[Unit]) -> None:
        """Gather a layer's units before its passes, and free them after its forward pass."""

        def before_forward(_: nn.Module, __: Any) -> None:
            if not self._in_backward:  # a recomputation finds them gathered
                self.states.acquire(units)

        def after_forward(_: nn.Module, __: Any, output: Any) -> None:
            if self._in_backward:
                return
            self.states.release(units)
            is_first = [True]

            def before_backward(gradient: torch.Tensor) -> None:
                if is_first:
                    is_first.clear()
                    self.states.acquire(units, backward=True)

            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(before_backward)

        layer.register_forward_pre_hook(before_forward)
        layer.register_forward_hook(after_forward)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the output of a module."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)


def _factors(grid: Grid, params: int, grads: int, optimizer: int, formats: Formats) -> Factors:
    numbers = (params, grads, optimizer, grid.data)
    legal = min(numbers) > 0 and not any(after % before for before, after in pairwise(numbers))
    if not legal:
        raise ConfigError(
            "params, grads, optimizer",
            f"{params}, {grads}, {optimizer} on {grid.data} ranks",
            "numbers of which each divides the next one, and the last one the number of ranks",
            f"use divisors of {grid.data} in ascending order",
        )
    encodes_sums = formats.at_each_step().encodes_sums
    return Factors(params, grads, optimizer, grid.data, encodes_sums, level_borders(grid))


def _groups(factors: Factors, rank: int) -> dict[Hop, dist.ProcessGroup]:
    """Create the groups of all hops, in the same order on all ranks; return those of this rank."""
    groups: dict[Hop, dist.ProcessGroup] = {}
    for hop in factors.collective_hops:
        for ranks in sorted({hop.group(other) for other in range(factors.data)}):
            group = dist.new_group(list(ranks))
            if rank in ranks:
                groups[hop] = group
    return groups


def _alone(rank: int, size: int) -> dist.ProcessGroup:
    """Return the group of this rank alone."""
    return [dist.new_group([other]) for other in range(size)][rank]
