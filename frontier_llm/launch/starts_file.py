"""The file `ranks.jsonl` of a run, with a line for each process that gets a rank."""

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

RANKS_FILE = "ranks.jsonl"


class StartsFile:
    """Appends a line for each new holder of a rank."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._recorded: set[int] = set()

    def record(
        self, generation: int, roster: Sequence[int], place: Callable[[int], tuple[str, int]]
    ) -> None:
        """Append the processes of a generation, by rank, that have no line yet.

        After an OSError, the next call tries again. `place` returns host and process id.
        """
        new = [(rank, number) for rank, number in enumerate(roster) if number not in self._recorded]
        with self._path.open("a") as file:
            for rank, number in new:
                host, pid = place(number)
                line = {
                    "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
                    "generation": generation,
                    "rank": rank,
                    "process": number,
                    "pid": pid,
                    "host": host,
                }
                file.write(json.dumps(line) + "\n")
        self._recorded.update(number for _, number in new)
