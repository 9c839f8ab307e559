"""Shard the states of a module over the ranks of `torch.distributed`.

The factors say over how many ranks one copy of the parameters, of the gradients and of the
optimizer states is divided (AMSP, arXiv:2311.00257; geometry/partition.py).

Each layer of the module (an element of an `nn.ModuleList`) is a unit: it is gathered before its
forward and its backward pass, and freed afterwards. All other parameters are one more unit, which
stays gathered during the passes.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from frontier_llm.collectives.kernel_choice import choose_kernels
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.collectives.transport import Transport
from frontier_llm.engine.hooks import attach
from frontier_llm.engine.module_units import layers_of, readers_of, records_of
from frontier_llm.engine.passes import Passes
from frontier_llm.engine.shard_settings import COUNT, AdamW, Formats, Precision, check_numbers
from frontier_llm.engine.sharded import Sharded
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.grid import Grid, level_borders
from frontier_llm.geometry.partition import Factors, Hop
from frontier_llm.protocols import ParameterRecord
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.sharding.unit import StateGroups


def shard(
    module: nn.Module,
    *,
    params: int = 1,
    grads: int | None = None,
    optimizer: int | None = None,
    formats: Formats = Formats.PLAIN,
    update: AdamW | None = None,
    precision: Precision | None = None,
    micro_batches: int = 1,
    ranks_per_node: int | None = None,
) -> Sharded:
    """Shard a module's parameters, gradients and optimizer states over all ranks.

    Collective over all ranks, which must hold equal parameters. The storage of the parameters is
    replaced. Raises a ConfigError if a factor does not divide the next one, parameters differ in
    dtype or device, or they differ between ranks.

    Args:
        module: on the device on which it trains, with parameters of one dtype.
        params: number of ranks over which one copy of the parameters is sharded.
        grads: the same for the gradients; a multiple of `params`; None = `params`.
        optimizer: the same for the optimizer states; a multiple of `grads` that divides the number
            of ranks; None = all ranks.
        formats: number formats in which states are sent.
        update: constants of the update; None = those of `AdamW()`.
        precision: dtypes of the computation; None = that of the parameters.
        micro_batches: backward passes per step, over which losses are averaged.
        ranks_per_node: neighbouring ranks that share a node; None = all ranks.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "torch.distributed",
            "not initialised",
            "a process group of all ranks",
            'call torch.distributed.init_process_group("gloo") or ("nccl") before shard',
        )
    size, rank = dist.get_world_size(), dist.get_rank()
    per_node, update = size if ranks_per_node is None else ranks_per_node, update or AdamW()
    check_numbers(*COUNT, micro_batches=micro_batches, ranks_per_node=per_node)
    grid = Grid(1, size, 1, per_node)
    factors = _factors(grid, params, grads, optimizer, formats)
    layers = layers_of(module)
    records = records_of(module, layers, update)
    _check_equal_start(records)
    dtype, values = records[0].parameter.dtype, precision.convert(module) if precision else {}
    traffic, readers = Traffic(grid, rank), readers_of(module, layers, records)
    transport = _transport(formats, traffic, records[0].parameter, rank)
    alone = [dist.new_group([other]) for other in range(size)][rank]
    state_groups = StateGroups(factors, rank, _groups(factors, rank), alone, {})
    states = ShardedStates(
        records, state_groups, transport, update, feedback=formats.feedback(), fuse_gradients=False
    )
    _set_masters(states, values)
    passes = Passes(module, [reader.module for reader in readers], states, micro_batches)
    attach(readers, states)
    return Sharded(module, states, passes, traffic, update, dtype)


def _check_equal_start(records: Sequence[ParameterRecord]) -> None:
    """Compare the sum and the norm of each parameter over all ranks; collective over them."""
    double, values = torch.float64, [record.parameter.detach() for record in records]
    sums = torch.stack([value.sum(dtype=double) for value in values])
    norms = torch.stack([torch.linalg.vector_norm(value, dtype=double) for value in values])
    numbers = torch.stack([sums, norms], dim=1).nan_to_num(1.0, 2.0, 3.0)
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


def _transport(formats: Formats, traffic: Traffic, parameter: nn.Parameter, rank: int) -> Transport:
    of_all_steps, device = formats.at_each_step(), parameter.device
    # as in training: kernels are compiled and verified only if a format is quantised
    kernels = choose_kernels("auto" if of_all_steps.is_quantised else "torch", device)
    return Transport(
        lambda step: of_all_steps, traffic, kernels, parameter.dtype, device, seed=rank << 16
    )


def _set_masters(states: ShardedStates, values: dict[nn.Parameter, torch.Tensor]) -> None:
    """Set the master weights to the values of parameters before they were converted."""
    if not values:
        return
    for part in states.shards(writable=True):
        value = values[part.record.parameter].flatten()
        part.master.copy_(value[part.start : part.start + part.elements])
    states.adopt(updates=0, step=0)


def _factors(
    grid: Grid, params: int, grads: int | None, optimizer: int | None, formats: Formats
) -> Factors:
    grads = params if grads is None else grads
    optimizer = grid.data if optimizer is None else optimizer
    numbers = (params, grads, optimizer, grid.data)
    legal = all(type(n) is int and n > 0 for n in numbers) and not any(
        after % before for before, after in pairwise(numbers)
    )
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
