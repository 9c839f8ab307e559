"""Read a table of measured runs: a CSV file whose columns are keys of the configuration.

The first line that does not begin with `#` names the columns. A column is a key (`model.hidden`), a
group (`cluster`, `model`, `planner.engine`), `ranks`, or one of the measured quantities of
planner/measured.py. `rounding` is the largest rounding error of the measured value, and `name`
labels a row. A cell `1|2|4` stands for values of which the fastest is taken.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from frontier_llm.cli.compose import compose, groups
from frontier_llm.config import RunConfig, decode
from frontier_llm.config.decode import keys, nearest
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate, ranks_to_plan
from frontier_llm.planner.measured import QUANTITIES, MeasuredRun
from frontier_llm.planner.schedule_choice import choose_schedule

RANKS, NAME, ROUNDING = "ranks", "name", "rounding"
ENGINE = "planner.engine"
ALTERNATIVES = "|"
"""Separates the values of a cell of which the fastest is taken."""
Row = dict[str, str]


def read_table(
    path: Path, overrides: Sequence[str] = (), progress: Callable[[str, float], None] | None = None
) -> list[MeasuredRun]:
    """Read a table and resolve its rows.

    Args:
        path: the file.
        overrides: overrides for all rows, such as `cluster=h100_8`; columns have precedence.
        progress: called with the progress.

    Raises:
        ConfigError: a column is not known, a cell is empty or wrong, or a row cannot be resolved.
            The error names the row.
    """
    rows = _read(path)
    quantity = _check_columns(path, list(rows[0]))
    runs = []
    for number, row in enumerate(rows, start=1):
        if progress is not None:
            progress("rows", number / len(rows))
        runs.append(_run(f"{path.name}, row {number}", number, row, quantity, overrides))
    return runs


def _read(path: Path) -> list[Row]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "--table", path, f"a CSV file that can be read ({error})", "name another file"
        ) from None
    rows = list(csv.DictReader(line for line in lines if line.strip() and line[0] != "#"))
    if not rows:
        raise ConfigError(
            "--table", path, "a line that names the columns, and a line per run", "add them"
        )
    for number, row in enumerate(rows, start=1):
        where = f"{path.name}, row {number}"
        if None in row or None in row.values():
            raise ConfigError(
                where, f"{len([v for v in row.values() if isinstance(v, str)])} cells",
                f"{len([key for key in row if key])} cells, one per column",
                "quote cells that contain commas",
            )  # fmt: skip
        for column, cell in row.items():
            if not cell.strip():
                raise ConfigError(
                    f"{where}, {column}", "an empty cell", "a value in every cell",
                    "fill it in; null stands for no value",
                )  # fmt: skip
    return rows


def _check_columns(path: Path, columns: Sequence[str]) -> str:
    """Check the names of the columns; return the measured quantity.

    Raises:
        ConfigError: a column is not known, or there is not exactly one measured quantity.
    """
    known = {name for name, _, _ in keys()} | groups().keys()
    known |= {RANKS, NAME, ROUNDING, ENGINE, *QUANTITIES}
    for column in columns:
        if column not in known:
            similar = nearest(column)
            raise ConfigError(
                f"{path.name}, row 0 (the names of the columns)",
                repr(column),
                f"keys of the configuration, {RANKS}, {NAME}, {ROUNDING} or "
                + ", ".join(QUANTITIES),
                f"did you mean {similar}?" if similar else "correct or remove the column",
            )
    measured = [column for column in columns if column in QUANTITIES]
    if len(measured) != 1:
        raise ConfigError(
            f"{path.name}, row 0 (the names of the columns)",
            ", ".join(measured) or "no measured quantity",
            "exactly one of " + ", ".join(QUANTITIES),
            "keep or add one column with measured values",
        )
    return measured[0]


def _run(where: str, number: int, row: Row, quantity: str, overrides: Sequence[str]) -> MeasuredRun:
    measured = _number(f"{where}, {quantity}", row[quantity])
    if not measured > 0:
        raise ConfigError(
            f"{where}, {quantity}", row[quantity], "a number above 0", "correct the cell"
        )
    candidates, refused = [], None
    for cells in _alternatives(row):
        try:
            candidates.append(_candidate(cells, overrides))
        except ConfigError as error:
            refused = error
    if not candidates:
        assert refused is not None
        raise ConfigError(f"{where}, {refused.key}", refused.got, refused.wants, refused.todo)
    hidden = (quantity, ROUNDING)
    return MeasuredRun(
        row=number,
        label=row.get(NAME) or " ".join(v for k, v in row.items() if k not in hidden),
        quantity=quantity,
        measured=measured,
        rounding=_number(f"{where}, {ROUNDING}", row.get(ROUNDING, "0")),
        candidates=tuple(candidates),
    )


def _number(where: str, cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise ConfigError(where, repr(cell), "a number", "correct the cell") from None


def _alternatives(row: Row) -> Iterator[Row]:
    """Yield the row with each combination of the alternatives in its cells."""
    choices = [cell.split(ALTERNATIVES) for cell in row.values()]
    for cells in product(*choices):
        yield dict(zip(row, cells, strict=True))


def _candidate(row: Row, overrides: Sequence[str]) -> Candidate:
    """Resolve a row without alternatives.

    Raises:
        ConfigError: a value is wrong, or the configuration cannot run on these ranks.
    """
    choices = {*groups(), ENGINE}
    base = tuple(f"{key}={cell}" for key, cell in row.items() if key in choices)
    keys_of_row = [key for key in row if key not in {*choices, RANKS, NAME, ROUNDING, *QUANTITIES}]
    values = tuple((key, row[key]) for key in keys_of_row)
    config = _with_values((*overrides, *base), values)
    if RANKS in row:
        launch = config.launch.model_copy(update={"ranks": _ranks(row[RANKS])})
        planner = config.planner.model_copy(update={"nodes": None})
        launch = launch.model_copy(update={"nodes": None})
        config = config.model_copy(update={"launch": launch, "planner": planner})
    ranks, ranks_per_node = ranks_to_plan(config)
    return Candidate.of(choose_schedule(config, ranks, ranks_per_node), ranks, ranks_per_node)


def _ranks(cell: str) -> int:
    if not cell.strip().isdigit() or int(cell) < 1:
        raise ConfigError(RANKS, repr(cell), "a number of ranks", "correct the cell")
    return int(cell)


def _with_values(choices: tuple[str, ...], cells: tuple[tuple[str, str], ...]) -> RunConfig:
    """Return the configuration of some choices with other values of some keys."""
    values = deepcopy(_composed(choices, tuple(key for key, _ in cells), _Cells(cells)))
    for key, cell in cells:
        *path, last = key.split(".")
        section = values
        for part in path:
            section = section[part]
        section[last] = yaml.safe_load(cell)
    return decode(values)


class _Cells(tuple[tuple[str, str], ...]):
    """Pairs of key and cell. All are equal, so that a cache ignores the cells."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Cells)

    def __hash__(self) -> int:
        return 0


@cache
def _composed(choices: tuple[str, ...], _: tuple[str, ...], cells: _Cells) -> dict[str, Any]:
    """Compose some choices. Cells of any row fill the keys that have no value without them."""
    return compose([*choices, *(f"{key}={cell}" for key, cell in cells)])
