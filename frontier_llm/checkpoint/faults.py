"""Points at which a test can kill this process, to see what a crash there leaves behind.

`FRONTIER_LLM_KILL_AT=file.half` ends the process by SIGKILL where `reach("file.half")` stands;
`file.half@3` does so on rank 3 only. Unset, which is always outside of tests, a point costs one
look at the environment. The points, in the order of a save:

| point | reached when |
|---|---|
| `file.created` | a rank's file exists, empty |
| `file.half` | half of its chunks are written |
| `file.written` | all are, nothing is synced |
| `file.synced` | the file is on disk, nobody knows |
| `reported` | the rank has reported; it waits for the others |
| `manifest.half` | rank 0 has written half of the manifest |
| `manifest.synced` | the manifest is on disk, in the partial folder |
| `sealed` | the decision to commit is made, the folder has its partial name |
| `renamed` | the folder has its final name |
| `concluded` | every rank has been told |
| `deleting` | half of an old checkpoint's files are deleted |
"""

import os
import signal

VARIABLE = "FRONTIER_LLM_KILL_AT"
POINTS = (
    "file.created", "file.half", "file.written", "file.synced", "reported", "manifest.half",
    "manifest.synced", "sealed", "renamed", "concluded", "deleting",
)  # fmt: skip


def reach(point: str, rank: int) -> None:
    """Die here if the environment says so."""
    if os.environ.get(VARIABLE) in (point, f"{point}@{rank}"):
        os.kill(os.getpid(), signal.SIGKILL)
