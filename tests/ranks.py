"""Run a function on several ranks: forked processes with gloo and a file store, without ports.

    from tests.ranks import run_ranks

    def sums(world, value):
        tensor = torch.tensor([float(value + world.rank)])
        dist.all_reduce(tensor)
        return tensor.item()

    def test_sum():
        assert run_ranks(sums, 4, 1) == [10.0] * 4

The first argument of the function is its `World`; results are returned by pickle. If a rank fails,
`RanksFailedError` has the traceback of every rank, starting with the one that is likely the cause.
"""

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # once, and not on each rank that recomputes layers
import torch.distributed as dist

from frontier_llm.launch.rendezvous import run_as_batch_work
from frontier_llm.launch.world import World
from tests.patience import Limit

_NEVER = timedelta(hours=1)
_HUNG, _LEFT = -1000, -1001
"""Exit codes of ranks that were killed: at the time limit, or because another rank had failed."""
_NETWORK_WORDS = ("Connection reset", "Connection closed", "Broken pipe", "Timed out", "gloo")


class RanksFailedError(AssertionError):
    """Some ranks raised an exception, died or did not end; the message has all tracebacks."""


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout: float = 60,
    ranks_per_node: int | None = None,
) -> list[Any]:
    """Call `function(world, *args)` on `size` gloo ranks; return the results by rank.

    Args:
        function: any callable, since the ranks are forked. Its result must be picklable.
        size: number of ranks.
        args: further arguments, the same on every rank.
        timeout: all ranks are killed when `tests.patience.Limit` of so many seconds is over.
        ranks_per_node: consecutive ranks that count as one node in `World`; None = one node.

    Raises:
        RanksFailedError: a rank failed; has the tracebacks of all ranks, the cause first.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ranks_") as name:
        folder = Path(name)
        pids = [
            _fork(_world(rank, size, ranks_per_node), folder, function, args)
            for rank in range(size)
        ]
        codes = _wait(pids, timeout)
        if any(codes):
            raise RanksFailedError(_report(folder, codes, timeout))
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(size)]


def in_turn(
    world: World, function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]
) -> list[Any]:
    """Call `function(world, *case)` for each case, in the order given; return the results.

    For `run_ranks(in_turn, size, function, cases)`: to fork ranks and to connect them takes as long
    as a few training steps. The cases share process groups: gloo has a thread for each, which wakes
    a hundred times per second. Groups that one case creates are distinct even if their ranks are
    the same.
    """
    from megatron.core import parallel_state

    created: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    results = []
    for case in cases:
        kept = {ranks: iter(tuple(groups)) for ranks, groups in created.items()}
        with mock.patch.object(dist, "new_group", partial(_new_group, created, kept)):
            results.append(function(world, *case))
        parallel_state.destroy_model_parallel()
    return results


_create_group = dist.new_group


def _new_group(
    created: dict[tuple[int, ...], list[Any]],
    kept: dict[tuple[int, ...], Iterator[Any]],
    ranks: Sequence[int],
    timeout: timedelta | None = None,
) -> Any:
    """Return the next group of these ranks that an earlier case has created, or a new one."""
    for group in kept.get(tuple(ranks), ()):
        return group
    created[tuple(ranks)].append(_create_group(ranks, timeout=timeout))
    return created[tuple(ranks)][-1]


def _world(rank: int, size: int, ranks_per_node: int | None) -> World:
    per_node = ranks_per_node or size
    return World(
        rank=rank,
        size=size,
        local_rank=rank,  # as in a local launch: several nodes are simulated on one machine
        ranks_per_node=per_node,
        host=f"node{rank // per_node}",
        launcher="local",
        master_address="127.0.0.1",
        master_port=0,
    )


def _fork(world: World, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _run(world, folder, function, args)
        code = 0
    except BaseException:
        part = folder / f"{world.rank}.part"  # this process may be killed while it writes
        part.write_text(traceback.format_exc())
        part.rename(folder / f"{world.rank}.error")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(world: World, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)
    run_as_batch_work()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=world.rank,
        world_size=world.size,
        timeout=_NEVER,  # the limit of the test ends ranks that hang
    )
    (folder / f"{world.rank}.connected").touch()
    # a rank may leave the group, and must not do so while others still connect
    while len(list(folder.glob("*.connected"))) < world.size:
        time.sleep(0.002)
    result = pickle.dumps(function(world, *args))
    (folder / f"{world.rank}.result").write_bytes(result)
    if dist.is_initialized():
        dist.barrier()  # no rank may close its sockets while another one still reads from them


def _wait(pids: list[int], timeout: float) -> list[int | None]:
    """Wait for all ranks and return their exit codes; after a failure do not wait for long."""
    codes: list[int | None] = [None] * len(pids)
    limit, killed = Limit(timeout), _HUNG
    try:
        while None in codes and not limit.is_over:
            for index, pid in enumerate(pids):
                if codes[index] is None and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[index] = os.waitstatus_to_exitcode(ended[1])
                    if codes[index] and killed == _HUNG:
                        limit, killed = Limit(0.5), _LEFT
            time.sleep(0.005)
    finally:
        for index, pid in enumerate(pids):
            if codes[index] is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return [killed if code is None else code for code in codes]


def _report(folder: Path, codes: list[int | None], timeout: float) -> str:
    """Describe how every rank ended; consequences of other failures come last."""
    texts = []
    for rank, code in enumerate(codes):
        file = folder / f"{rank}.error"
        if file.exists():
            text = file.read_text()
        elif code == _HUNG:
            text = f"did not end (limit: {timeout} s on a quiet machine)\n"
        elif code == _LEFT:
            text = "was killed because another rank had failed\n"
        elif code:
            text = f"ended with {code}" + (" (signal)\n" if code < 0 else "\n")
        else:
            text = "completed\n"
        is_consequence = (
            code == 0 or not file.exists() or any(word in text for word in _NETWORK_WORDS)
        )
        texts.append((is_consequence, rank, f"--- rank {rank}: {text}"))
    return "\n" + "\n".join(text for _, _, text in sorted(texts))
