"""Read the experiments of `conf/`: their configurations, and the headers of their files."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from frontier_llm.cli.compose import compose
from frontier_llm.config import RunConfig, decode


@dataclass(frozen=True)
class Header:
    """The comments at the top of an experiment's file."""

    title: str
    """The description: all comments above the line `# ranks: N`."""
    ranks: int
    run: str

    @classmethod
    def read(cls, path: Path) -> "Header":
        """Read the comments above the first key of conf/experiment/*.yaml.

        Raises a ValueError if the comments lack `ranks` or `run`.
        """
        lines = comments(path)
        matches = [re.fullmatch(r"(\w+): (.+)", line) for line in lines]
        keyed = {match[1]: match[2] for match in matches if match}
        if not {"ranks", "run"} <= keyed.keys():
            raise ValueError(
                f"{path.name}: '# ranks: N' and '# run: COMMAND' must be above the first key"
            )
        ranks_line = next(i for i, line in enumerate(lines) if line.startswith("ranks: "))
        return cls(title=" ".join(lines[:ranks_line]), ranks=int(keyed["ranks"]), run=keyed["run"])


@cache
def composed(*overrides: str) -> RunConfig:
    """Return the configuration of overrides. Results are cached: configurations are immutable."""
    return decode(compose(overrides))


def comments(path: Path) -> list[str]:
    """Return the comments above the first key; a backslash at the end joins two lines."""
    lines: list[str] = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        text = line.removeprefix("#").strip()
        if lines and lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\") + text
        elif not text.startswith("@package"):
            lines.append(text)
    return lines
