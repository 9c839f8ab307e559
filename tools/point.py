"""What one point of a sweep came to, and the file that keeps it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from frontier_llm.errors import DataError

POINT_FILE = "point.json"

Status = Literal["done", "refused", "out of memory", "failed", "too slow"]


@dataclass(frozen=True)
class Point:
    """What one point came to."""

    overrides: list[str]
    status: Status
    reason: str
    """Last words of a point that is not done."""
    seconds: float
    tokens_per_second: float
    """Median after the warm-up; 0 where the point is not done."""
    peak_bytes: int | None
    """Of the rank that held most."""
    loss: float | None
    """Of the last step."""
    validation_loss: float | None
    """After it."""

    @classmethod
    def read(cls, folder: Path) -> "Point":
        """Read a point's file.

        Raises:
            DataError: it holds something else.
        """
        path = folder / POINT_FILE
        try:
            return cls(**json.loads(path.read_text()))
        except (ValueError, TypeError):
            raise DataError(
                f"{path} is damaged: it holds no point of a sweep\n"
                f"  do: remove {folder}, and run that point again"
            ) from None

    def write(self, folder: Path) -> None:
        """Write its file, whole or not at all."""
        partial = folder / f"{POINT_FILE}.partial"
        partial.write_text(json.dumps(asdict(self), indent=1))
        partial.replace(folder / POINT_FILE)
