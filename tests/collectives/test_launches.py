"""Number of kernels that a GPU starts for a quantised message: a few, however many ranks there are.

Triton's kernels are run by its interpreter and the group is torch's fake group, so this is what the
transport does on a GPU, on this machine.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from frontier_llm.collectives.handles import Chain
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.collectives.transport import Transport
from frontier_llm.geometry.formats import Format, LevelFormats, StateFormats
from frontier_llm.geometry.grid import Grid

pytestmark = pytest.mark.slow

RANKS, OWN, ELEMENTS = 8, 3, 600
BORDER = 5 * ELEMENTS + 100  # inside part 5; parts 6 and 7 are not quantised
BUDGETS = {"gather": 2, "reduce": 4}
"""A gather quantises and dequantises. A reduction quantises, copies this rank's part, adds up, and
copies the sum to where the caller wants it."""


class Launches(TorchDispatchMode):
    """Counts operations that are kernels on a GPU, besides collectives."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_kernel = not func.is_view and func.namespace == "aten" and "empty" not in str(func)
        self.count += is_kernel
        return func(*args, **(kwargs or {}))


def count_launches() -> dict[str, int]:
    """Return the launches of a gather and of a reduction over 8 ranks."""
    from triton.runtime.interpreter import InterpretedFunction

    from frontier_llm.collectives.triton_blockwise import TritonKernels

    mode, run = Launches(), InterpretedFunction.run

    def run_as_one_launch(*args: Any, **kwargs: Any) -> None:
        before = mode.count
        run(*args, **kwargs)
        mode.count = before + 1  # the interpreter uses torch

    InterpretedFunction.run = run_as_one_launch
    dist.init_process_group("fake", store=FakeStore(), rank=OWN, world_size=RANKS)
    int8, traffic = Format("int8", 64, 2), Traffic(Grid(1, RANKS, 1, RANKS), OWN)
    formats, kernels = StateFormats(int8, grads=LevelFormats(int8, int8, int8)), TritonKernels()
    transport = Transport(
        lambda _: formats, traffic, kernels, torch.bfloat16, torch.device("cpu"), pairwise=False
    )
    group, counts = dist.group.WORLD, {}
    parameters = torch.randn(RANKS * ELEMENTS).bfloat16()
    gradients, out = torch.randn(RANKS * ELEMENTS), torch.empty(ELEMENTS)
    for name, steps in (
        ("gather", transport.gather(parameters, [group], int8, BORDER, "gather")),
        ("reduce", transport.reduce(gradients, [(group, None)], BORDER, "reduce", out)),
    ):
        mode.count = 0
        with mode:
            Chain(steps).wait()
        counts[name] = mode.count
    return counts


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_message_over_eight_ranks_starts_a_few_kernels():
    work = "from tests.collectives.test_launches import count_launches; print(count_launches())"
    done = subprocess.run(
        [sys.executable, "-c", work], check=False, capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(BUDGETS)
