"""Points of a save at which a test can kill this process, to check what a crash leaves behind.

With `FRONTIER_LLM_KILL_AT=file.half` in the environment, `reach("file.half")` kills the process by
SIGKILL. The value `file.half@3` does so on rank 3 only, and `file.half+drain` only while a
checkpoint is copied from the node's disk to the run directory (`+partner`: to the next node).
Outside of tests the variable is unset, so `reach` only reads the environment. The points, in the
order of a save:

| point | reached when |
|---|---|
| `file.created` | the rank's file exists and is empty |
| `file.half` | half of the chunks are written |
| `file.written` | all chunks are written, but not synced |
| `file.synced` | the file is on disk, but not yet reported |
| `reported` | the rank has reported and waits for the other ranks |
| `manifest.half` | rank 0 has written half of the manifest |
| `manifest.synced` | the manifest is on disk, in the partial folder |
| `sealed` | the decision to commit is made; the folder still has its partial name |
| `renamed` | the folder has its final name |
| `concluded` | rank 0 has published the outcome to all ranks |
| `deleting` | half of the files of an old checkpoint are deleted |
"""

import os
import signal
import threading

VARIABLE = "FRONTIER_LLM_KILL_AT"


def reach(point: str, rank: int) -> None:
    """Kill this process if the environment names this point, for all ranks or for this rank."""
    place, _, thread = os.environ.get(VARIABLE, "").partition("+")
    if thread and threading.current_thread().name != thread:
        return
    if place in (point, f"{point}@{rank}"):
        os.kill(os.getpid(), signal.SIGKILL)
