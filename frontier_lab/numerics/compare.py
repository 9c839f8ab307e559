"""Compare all kernels of a run on every rank, print a table, and name the first wrong kernel.

trainer/assemble.py is the model for what is built: the same functions make the modules.
"""

import json
from collections.abc import Callable, Iterator
from datetime import timedelta

from torch.distributed import Store

from frontier_lab.numerics.layers import model_checks
from frontier_lab.numerics.state_kernels import state_checks
from frontier_lab.numerics.subject import Check, subject
from frontier_llm.config.run import RunConfig
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.errors import FrontierError
from frontier_llm.launch.coordination import broadcast_from_rank_zero
from frontier_llm.launch.world import World

TIMEOUT = timedelta(minutes=60)
_KEY = "numerics"
ADVICE = {
    "norm": "set kernels=torch",
    "queries and keys": "set kernels=torch",
    "activation": "set kernels=torch",
    "linear product": "set sharding.fused_gradients=false",
    "sum": "set sharding.fused_gradients=false",
    "quantiser": "set kernels=torch, or collectives=plain",
    "optimizer": "choose another optimizer",
    "cast": "set precision=fp32",
}
"""By the first words of a kernel's name: what avoids the kernel."""


class NumericsError(FrontierError):
    """A kernel differs from its reference by more than rounding explains."""


def checks(
    config: RunConfig, accelerator: Accelerator, precision: str, seed: int
) -> Iterator[Check]:
    """Yield the checks of all kernels of a run, in the order of a step.

    The process must have no process group. Ranks have different seeds, so that together they
    compare more rows.
    """
    with subject(config, accelerator, precision, seed) as s:
        yield from model_checks(s)
    with subject(config, accelerator, precision, seed, small=True) as s:
        yield from state_checks(s)


def compare_on_all_ranks(
    config: RunConfig,
    world: World,
    store: Store,
    accelerator: Accelerator,
    precision: str,
    show: Callable[[str], None],
) -> None:
    """Compare all kernels on the device of each rank.

    Collective over all ranks, through the store only.

    Raises:
        NumericsError: a kernel is wrong on some rank. Raised on rank 0.
        RankFailure: on the other ranks, in this case.
    """
    if world.rank == 0:
        show(_line("kernel", "from", "type", "error", "bound", "", "shape"))
    wrong = []
    for check in checks(config, accelerator, precision, config.trainer.seed + world.rank):
        if world.rank == 0:
            show(describe(check))
        if not check.is_right:
            wrong.append(explain(check, config))
    store.set(f"{_KEY}/{world.rank}", json.dumps([world.host, wrong]))

    def judge() -> str:
        found, total = [], 0
        for rank in range(world.size):
            store.wait([f"{_KEY}/{rank}"], TIMEOUT)
            host, messages = json.loads(store.get(f"{_KEY}/{rank}"))
            total += len(messages)
            if messages:
                more = f" (and {len(messages) - 1} more kernels)" if len(messages) > 1 else ""
                found.append(f"rank {rank} on {host}: {messages[0]}{more}")
        if found:
            raise NumericsError("\n".join(found))
        return "right"

    broadcast_from_rank_zero(world, store, f"{_KEY}/verdict", judge, TIMEOUT)


def describe(check: Check) -> str:
    """Return the line of a kernel in the table."""
    verdict = "ok" if check.is_right else f"WRONG: {check.worst}"
    numbers = f"{check.error:.1e}", f"{check.bound:.1e}"
    return _line(check.kernel, check.implementation, check.dtype, *numbers, verdict, check.shape)


def _line(kernel: str, source: str, dtype: str, error: str, bound: str, *rest: str) -> str:
    verdict, shape = rest
    return f"{kernel:<38} {source:<16.16} {dtype:<4} {error:>8} {bound:>8}  {verdict:<5} {shape}"


def explain(check: Check, config: RunConfig) -> str:
    """Return what is wrong with a kernel, and what to set instead."""
    advice = next(
        (words for name, words in ADVICE.items() if check.kernel.startswith(name)),
        "use another release of torch",
    )
    if check.kernel.startswith("attention"):
        advice = f"set attention={'sdpa' if config.attention == 'flex' else 'flex'}"
    return (
        f"the kernel '{check.kernel}' ({check.implementation}, {check.dtype}) is wrong: "
        f"{check.worst} differs from fp64 by {check.error:.1e}, and rounding explains at most "
        f"{check.bound:.1e} (relative to the root mean square). A run would train with wrong "
        f"numbers and report no error. Do: {advice}, and run this command again; if the kernel is "
        "right on other devices of this kind, exclude this host"
    )
