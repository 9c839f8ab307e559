"""Start the ranks of this machine again after a failure that may have passed.

A run is started again if a rank died, hung, lost contact or failed with an error of the program.
It is not if a message says what the user has to do (a wrong configuration, divergence, a full
disk), or if it was asked to stop. A run that fails again and again without a new step in between
ends after a number of tries.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from frontier_llm.errors import print_error
from frontier_llm.launch.launcher import Ended, LaunchOptions, launch
from frontier_llm.launch.slurm import STARTED_AGAIN
from frontier_llm.launch.world import World

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

Target = Callable[[World, "Store"], None]


def launch_with_restarts(
    target: Callable[[int], Target],
    options: LaunchOptions,
    restarts: int,
    steps_done: Callable[[], int],
) -> int:
    """Run the work of the ranks, again after a failure, and return the exit code of the job.

    Args:
        target: returns the work of the ranks for the start with this number, counted from 0.
        options: options of each start.
        restarts: how many times the ranks are started again without a new step in between.
        steps_done: returns the number of steps of which the run has records.
    """
    start, tries, most_steps = 0, 0, steps_done()
    while True:
        ended = launch(target(start), options)
        if not may_have_passed(ended):
            return ended.exit_code
        steps = steps_done()
        tries = 0 if steps > most_steps else tries
        most_steps = max(most_steps, steps)
        if tries >= restarts:
            if restarts:
                times = f"{tries + 1} time(s) without a new step"
                print_error(f"the run failed {times}: it is not started again")
            return ended.exit_code
        start, tries = start + 1, tries + 1
        os.environ[STARTED_AGAIN] = "1"
        print_error(
            f"the run is started again, from its newest checkpoint (try {tries} of {restarts} "
            f"without a new step; launch.restarts)"
        )


def may_have_passed(ended: Ended) -> bool:
    """Whether a job failed for a reason that may be gone when it is started again."""
    return ended.cause is not None and ended.cause.kind not in ("user", "stopped")
