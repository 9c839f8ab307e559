"""Read a table of measured runs: a CSV file whose columns are keys of the configuration.

The first line that does not begin with `#` names the columns. A column is a key (`model.hidden`), a
group (`cluster`, `model`, `planner.engine`), `ranks`, or one of the measured quantities of
planner/measured.py. `rounding` is the largest rounding error of the measured value, and `name`
labels a row. A cell `1|2|4` stands for values of which the fastest is taken.
"""

import csv
import math
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
from frontier_llm.planner.choice import choose
from frontier_llm.planner.measured import QUANTITIES, MeasuredRun

RANKS, NAME, ROUNDING = "ranks", "name", "rounding"
ENGINE = "planner.engine"
GIVE_RANKS = (RANKS, "launch.ranks", "launch.nodes", "planner.nodes")
"""Columns or overrides that give the number of ranks."""
ALTERNATIVES = "|"
"""Separates the values of a cell of which the fastest is taken."""
OTHER_NAMES = {
    "gpus": RANKS,
    "gcds": RANKS,
    "devices": RANKS,
    "nodes": "planner.nodes",
    "measured_tokens_per_second_per_gpu": "measured_tokens_per_second",
}
"""Columns of the tables of other programs, with the column of the same meaning."""
Row = dict[str, str]


def read_table(
    path: Path, overrides: Sequence[str] = (), progress: Callable[[str, float], None] | None = None
) -> list[MeasuredRun]:
    """Read a table and resolve its rows.

    Args:
        overrides: overrides for all rows, such as `cluster=h100_8`; columns have precedence.

    Raises:
        ConfigError: a column is not known, a cell is empty or wrong, or a row cannot be resolved.
            The error names the row.
    """
    rows = _read(path)
    quantity = _check_columns(path, list(rows[0]), overrides)
    runs = []
    for number, row in enumerate(rows, start=1):
        if progress is not None:
            progress("rows", number / len(rows))
        runs.append(_run(f"{path.name}, row {number}", number, row, quantity, overrides))
    return runs


def _read(path: Path) -> list[Row]:
    """Return the rows of a table, without comments and empty lines."""
    try:
        # utf-8-sig: spreadsheets write a mark before the first character
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        cells = list(csv.reader(line for line in lines if line.strip() and line[0] != "#"))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            "--table", path, f"a CSV file that can be read ({error})", "name another file"
        ) from None
    if len(cells) < 2:
        wants = "a line that names the columns, and a line per run"
        raise ConfigError("--table", path, wants, "add them")
    columns = [column.strip() for column in cells[0]]
    return [
        _row(f"{path.name}, row {number}", columns, row)
        for number, row in enumerate(cells[1:], start=1)
    ]


def _row(where: str, columns: Sequence[str], cells: Sequence[str]) -> Row:
    if len(cells) != len(columns):
        raise ConfigError(
            where,
            f"{len(cells)} cells",
            f"{len(columns)} cells, one per column",
            "add or remove cells; quote a cell that contains commas",
        )
    row = {column: cell.strip() for column, cell in zip(columns, cells, strict=True)}
    for column, cell in row.items():
        if not cell:
            raise ConfigError(
                f"{where}, {column}",
                "an empty cell",
                "a value in every cell",
                "fill it in; null stands for no value",
            )
    return row


def _check_columns(path: Path, columns: Sequence[str], overrides: Sequence[str]) -> str:
    """Check the names of the columns; return the measured quantity.

    Raises:
        ConfigError: a column is not known, there is not exactly one measured quantity, or nothing
            gives the number of ranks.
    """
    names = f"{path.name}, names of the columns"
    known = {name for name, _, _ in keys()} | groups().keys()
    known |= {RANKS, NAME, ROUNDING, ENGINE, *QUANTITIES}
    for column in columns:
        if column not in known:
            similar = OTHER_NAMES.get(column) or nearest(column)
            raise ConfigError(
                names,
                repr(column),
                f"keys of the configuration, {RANKS}, {NAME}, {ROUNDING} or "
                + ", ".join(QUANTITIES),
                f"did you mean {similar}?" if similar else "correct or remove the column",
            )
    measured = [column for column in columns if column in QUANTITIES]
    if len(measured) != 1:
        raise ConfigError(
            names,
            ", ".join(measured) or "no measured quantity",
            "exactly one of " + ", ".join(QUANTITIES),
            "keep or add one column with measured values",
        )
    given = {*columns, *(override.partition("=")[0] for override in overrides)}
    if not given & {*GIVE_RANKS, "experiment"}:
        raise ConfigError(
            names,
            "no number of ranks",
            "one of the columns " + ", ".join(GIVE_RANKS),
            f"add a column {RANKS}",
        )
    return measured[0]


def _run(where: str, number: int, row: Row, quantity: str, overrides: Sequence[str]) -> MeasuredRun:
    measured = _number(f"{where}, {quantity}", row[quantity])
    rounding = _number(f"{where}, {ROUNDING}", row.get(ROUNDING, "0"), least=0.0)
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
        rounding=rounding,
        candidates=tuple(candidates),
    )


def _number(where: str, cell: str, least: float = 1e-12) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        wants = "a number above 0" if least else "a number, 0 or larger"
        raise ConfigError(where, repr(cell), wants, "correct the cell")
    return value


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
    choices = _choices()
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
    return Candidate.of(choose(config, ranks, ranks_per_node), ranks, ranks_per_node)


def _ranks(cell: str) -> int:
    if not cell.strip().isdigit() or int(cell) < 1:
        raise ConfigError(RANKS, repr(cell), "a number of ranks", "correct the cell")
    return int(cell)


@cache
def _choices() -> frozenset[str]:
    """Return the columns that choose a file."""
    return frozenset({*groups(), ENGINE})


def _with_values(choices: tuple[str, ...], cells: tuple[tuple[str, str], ...]) -> RunConfig:
    """Return the configuration of some choices with other values of some keys."""
    values = deepcopy(_composed(choices, tuple(key for key, _ in cells), _Cells(cells)))
    for key, cell in cells:
        *path, last = key.split(".")
        section = values
        for part in path:
            section = section[part]
        section[last] = _value(key, cell)
    return decode(values)


def _value(key: str, cell: str) -> Any:
    try:
        return yaml.safe_load(cell)
    except yaml.YAMLError:
        raise ConfigError(key, repr(cell), "a value that can be read", "correct the cell") from None


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
