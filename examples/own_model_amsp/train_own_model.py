"""Train a plain torch model of your own with sharded states (AMSP), without the trainer.

    python examples/own_model_amsp/train_own_model.py
    python examples/own_model_amsp/train_own_model.py --factors 1 4 4 --steps 20

Four gloo ranks on two simulated nodes train a model with sharded states. A single process trains
the same model with torch's AdamW. The losses of both are printed and must agree.

AMSP shards parameters, gradients and optimizer states over three different numbers of ranks: the
factors PARAMS, GRADS and OPTIMIZER of --factors. A unit is a group of parameters that are gathered
together; here each block of the model is a unit.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from frontier_llm.collectives.kernel_choice import choose_kernels
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.collectives.transport import Transport
from frontier_llm.config.optimizer import OptimizerConfig
from frontier_llm.errors import TrainingError
from frontier_llm.geometry.formats import StateFormats
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.partition import Factors, Hop
from frontier_llm.launch.launcher import LaunchOptions, launch
from frontier_llm.launch.rendezvous import init_process_group
from frontier_llm.launch.world import World
from frontier_llm.protocols import ParameterRecord, Placement
from frontier_llm.sharding.sharded_states import ShardedStates
from frontier_llm.sharding.unit import StateGroups

if TYPE_CHECKING:
    from torch.distributed import Store

RANKS, RANKS_PER_NODE = 4, 2
WIDTH, BLOCKS = 64, 4  # size of the model
SAMPLES = 64  # samples per step over all ranks
CLIP_NORM = 1.0
CPU = torch.device("cpu")
ADAMW = OptimizerConfig(
    name="adamw", learning_rate=1e-3, minimum_learning_rate=1e-3, warmup_steps=0, decay_steps=None,
    beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, clip_norm=CLIP_NORM,
)  # fmt: skip


class Block(nn.Module):
    """A residual block of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, WIDTH] to the same shape."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class OwnModel(nn.Sequential):
    """Blocks and an output layer; each of these modules is one unit."""

    def __init__(self) -> None:
        torch.manual_seed(1)  # all ranks must draw the same weights
        super().__init__(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 1))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs [SAMPLES, WIDTH] and targets [SAMPLES, 1] of a step."""
    inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.sin().sum(dim=1, keepdim=True) / WIDTH**0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Train on all ranks and compare with a single process; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--factors", type=int, nargs=3, default=[2, 2, 4], metavar=("PARAMS", "GRADS", "OPTIMIZER"),
        help="ranks over which each state is sharded; each factor divides the next",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(arguments)
    params, grads, optimizer = options.factors
    factors = Factors(params, grads, optimizer, data=RANKS)
    with tempfile.TemporaryDirectory() as folder:
        launched = LaunchOptions(RANKS, Path(folder), ranks_per_node=RANKS_PER_NODE)
        return launch(partial(train_rank, factors, options.steps), launched).exit_code


def train_rank(factors: Factors, steps: int, world: World, store: "Store") -> None:
    """Train on one rank; rank 0 compares the losses with those of a single process.

    Raises:
        TrainingError: on rank 0: the losses differ.
    """
    init_process_group(world, store, "gloo", timedelta(seconds=60))
    model = OwnModel()
    groups, transport = make_groups(factors, world.rank), make_transport(world)
    states = ShardedStates(list(records(model)), groups, transport, ADAMW)
    attach(model, states)
    losses = [train_step(step, model, states, world) for step in range(1, steps + 1)]
    states.settle()
    if world.rank == 0:
        kib = {name: round(size / 1024) for name, size in states.memory_bytes().items()}
        print(f"KiB per rank: {kib}")
        compare(losses, single_process_losses(steps))


def records(model: OwnModel) -> list[ParameterRecord]:
    """Describe the parameters in the order of the forward pass; each child module is one unit."""
    all_records = []
    for unit, module in model.named_children():
        for name, parameter in module.named_parameters():
            shape, zeros = tuple(parameter.shape), (0,) * parameter.dim()
            all_records.append(
                ParameterRecord(
                    parameter=parameter,
                    unit=unit,
                    # where the parameter lies in the whole tensor: without tensor parallelism it is
                    # the whole tensor
                    placements=(Placement(f"{unit}.{name}", shape, zeros, zeros, shape),),
                    group="matrices" if parameter.dim() > 1 else "norms",  # for weight decay
                    counted=True,  # this rank adds the parameter to the norm of the gradients
                    tensor_partial=False,
                    tied=False,
                )
            )
    return all_records


def make_groups(factors: Factors, rank: int) -> StateGroups:
    """Make the process groups that follow from the factors. Collective over all ranks.

    The factors give each rank four digits: params, grads, optimizer and replica. Ranks that differ
    in one digit only form a group (docs/sharding.md). A digit may be divided into several hops.
    """
    this_rank_alone = [dist.new_group([other]) for other in range(RANKS)][rank]
    return StateGroups(
        factors=factors,
        data_rank=rank,
        groups={hop: make_group(hop, rank) for hop in factors.collective_hops},
        tensor_group=this_rank_alone,
        tied_groups={},
    )


def make_group(hop: Hop, rank: int) -> dist.ProcessGroup:
    """Make the groups of ranks that differ in one hop only; return the group of this rank."""
    group_of_this_rank = None
    for ranks in sorted({hop.group(other) for other in range(RANKS)}):
        group = dist.new_group(list(ranks))  # every rank must call new_group for every group
        if rank in ranks:
            group_of_this_rank = group
    assert group_of_this_rank is not None
    return group_of_this_rank


def make_transport(world: World) -> Transport:
    """Return a transport that sends all states in fp32; other `StateFormats` quantise them."""
    grid = Grid(tensor=1, data=RANKS, pipeline=1, ranks_per_node=RANKS_PER_NODE)
    return Transport(
        lambda step: StateFormats(),
        Traffic(grid, world.rank),  # counts the bytes that are sent
        choose_kernels("torch", CPU),  # quantises in other formats
        torch.float32,
        CPU,
    )


def attach(model: OwnModel, states: ShardedStates) -> None:
    """Add hooks that gather the parameters of a unit before its forward and its backward pass.

    A hook also releases the parameters after the forward pass. `states` releases them itself after
    the backward pass.
    """
    for name, module in model.named_children():
        units = states.units([name])

        def before_forward(*_: Any, units: Any = units) -> None:
            states.acquire(units)

        def after_forward(_: nn.Module, __: Any, output: torch.Tensor, units: Any = units) -> None:
            output.register_hook(lambda _: states.acquire(units, backward=True))
            states.release(units)

        module.register_forward_pre_hook(before_forward)
        module.register_forward_hook(after_forward)


def train_step(step: int, model: OwnModel, states: ShardedStates, world: World) -> float:
    """Run one step on this rank's samples; return the mean loss over the samples of all ranks."""
    inputs, targets = (tensor.chunk(world.size)[world.rank] for tensor in batch(step))
    states.begin_step(step, micro_batches=1)
    loss = nn.functional.mse_loss(model(inputs), targets) / world.size
    loss.backward()
    states.finish_backward()
    squared_norm, total_loss = states.squared_norm(), loss.detach().clone()
    dist.all_reduce(squared_norm)
    dist.all_reduce(total_loss)
    states.update(ADAMW.learning_rate, clip_divisor(squared_norm.sqrt()))
    states.refresh()
    return total_loss.item()


def clip_divisor(norm: torch.Tensor) -> torch.Tensor:
    """Return the number by which gradients are divided to limit their norm, [] fp32."""
    return (norm / CLIP_NORM).clamp(min=1.0).float()


def single_process_losses(steps: int) -> list[float]:
    """Train the same model in this process with torch's AdamW; return the losses."""
    model = OwnModel()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": ADAMW.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    betas = (ADAMW.beta1, ADAMW.beta2)
    optimizer = torch.optim.AdamW(groups, ADAMW.learning_rate, betas=betas, eps=ADAMW.epsilon)
    losses = []
    for step in range(1, steps + 1):
        inputs, targets = batch(step)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= clip_divisor(norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(sharded: Sequence[float], single: Sequence[float]) -> None:
    """Print the losses of both trainings, step by step.

    Raises:
        TrainingError: the losses of a step differ by more than rounding.
    """
    print("step  sharded   single process")
    for step, (loss, expected) in enumerate(zip(sharded, single, strict=True), start=1):
        print(f"{step:4}  {loss:.6f}  {expected:.6f}")
        if abs(loss - expected) > 1e-4 * expected:
            raise TrainingError(f"step {step}: the losses {loss} and {expected} differ")


if __name__ == "__main__":
    sys.exit(main())
