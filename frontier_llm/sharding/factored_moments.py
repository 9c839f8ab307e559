"""Second moments of matrices, kept as sums over rows and sums over columns.

The second moment of element (i, j) is rows[i] * columns[j] / sum(rows), where `rows` and `columns`
are decayed sums of the squared gradients (Shazeer and Stern, Adafactor, arXiv:1804.04235,
section 3). A parameter may fuse several matrices, which have separate moments.

The optimizer intervals of ranks may end inside a matrix. Each rank adds up the squares that it
holds, and the sums are added up over the ranks that hold parts of the same matrices. All of these
ranks keep all sums of their units, which are small.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from frontier_llm.geometry.partition import Interval
from frontier_llm.protocols import ParameterRecord, Placement, StateShard
from frontier_llm.sharding.unit import Unit

TINY = 1e-30
"""Number that is added to each squared gradient (`epsilon_1` of the paper)."""


class Box(NamedTuple):
    """A block of whole or partial rows of a matrix, in a contiguous range of its elements."""

    part: slice
    """Where the block lies in this rank's optimizer interval."""
    rows: slice
    columns: slice

    def view(self, interval: torch.Tensor) -> torch.Tensor:
        """Return the block, [rows, columns], of a tensor that covers the optimizer interval."""
        rows = self.rows.stop - self.rows.start
        return interval[self.part].view(rows, self.columns.stop - self.columns.start)


@dataclass(frozen=True, eq=False)
class FactoredMoment:
    """The second moments of one parameter, which may fuse several matrices.

    In shapes, r and c are the rows and columns of the parameter on this tensor rank, and m is the
    number of matrices that it fuses.
    """

    record: ParameterRecord
    index: int
    """Index of the unit."""
    boxes: tuple[Box, ...]
    """The blocks of the parameter whose states this rank holds; they may be none."""
    is_first: bool
    """Whether this rank holds the first element. It then saves the moments."""
    matrix_of_row: torch.Tensor
    """[r] int64, the matrix to which each row belongs."""
    counts: torch.Tensor
    """[m] fp32, number of elements of each whole matrix."""
    rows: torch.Tensor
    """[r] fp32, decayed sums over the columns."""
    columns: torch.Tensor
    """[m, c] fp32, decayed sums over the rows."""

    def add_squares(
        self, gradients: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
    ) -> None:
        """Add the squares of this rank's gradients to sums `rows` [r] and `columns` [m, c]."""
        for box in self.boxes:
            squares = box.view(gradients).square()
            rows[box.rows] += squares.sum(dim=1)
            columns[:, box.columns].index_add_(0, self.matrix_of_row[box.rows], squares)

    def normalise(self, gradients: torch.Tensor) -> None:
        """Divide this rank's gradients by the square roots of their second moments, in place."""
        matrix_of_row = self.matrix_of_row
        if self.record.tensor_dim == 0:  # the other rows are on other tensor ranks
            totals = self.columns.sum(dim=1)
        else:
            totals = torch.zeros_like(self.counts).index_add_(0, matrix_of_row, self.rows)
        share = self.rows / totals[matrix_of_row]
        row_factors, column_factors = share.rsqrt(), self.columns.rsqrt()
        for box in self.boxes:
            view, matrices = box.view(gradients), matrix_of_row[box.rows]
            view *= row_factors[box.rows, None]
            view *= column_factors[matrices, box.columns]

    def squares_of(self, values: torch.Tensor) -> torch.Tensor:
        """Return [m] fp32: the sums of the squares of this rank's values, by matrix."""
        sums = torch.zeros_like(self.counts)
        for box in self.boxes:
            squares = box.view(values).square().sum(dim=1)
            sums.index_add_(0, self.matrix_of_row[box.rows], squares)
        return sums


def factored_moments(units: Sequence[Unit], device: torch.device) -> list[FactoredMoment]:
    """Return the moments of all matrices and tables of the units, zero, in the order of the units.

    Ranks that hold parts of the same units get equal lists, except for `boxes` and `is_first`.
    """
    found = []
    for number, unit in enumerate(units):
        held = {index: (interval, start) for index, interval, start in unit.held_parameters()}
        for index, record in enumerate(unit.records):
            if not is_factored(record):
                continue
            interval, start = held.get(index, (Interval(unit.optimizer_interval.start, 0), -1))
            first = interval.start - unit.optimizer_interval.start
            rows, columns = record.parameter.shape
            members = _matrix_of_row(record)
            matrices = int(members.max()) + 1
            moment = FactoredMoment(
                record=record,
                index=number,
                boxes=tuple(_boxes(first, start, interval.length, columns)),
                is_first=start == 0,
                matrix_of_row=members.to(device),
                counts=torch.tensor(_counts(record, matrices), device=device),
                rows=torch.zeros(rows, device=device),
                columns=torch.zeros(matrices, columns, device=device),
            )
            found.append(moment)
    return found


def is_factored(record: ParameterRecord) -> bool:
    """Whether a parameter is a matrix or a table, whose second moments are factored."""
    return record.is_matrix and record.parameter.dim() == 2


def count_sums(record: ParameterRecord) -> int:
    """Return the number of sums over rows and columns that a rank keeps of a parameter."""
    if not is_factored(record):
        return 0
    rows, columns = record.parameter.shape
    return rows + columns * (int(_matrix_of_row(record).max()) + 1)


def moment_shards(moment: FactoredMoment, *, first_tensor_rank: bool) -> tuple[StateShard, ...]:
    """Return the moments as shards of two tensors of the model, for checkpoints.

    The tensors are `NAME.second_moment_rows` [rows] and `NAME.second_moment_columns` [matrices,
    columns], for each global tensor NAME in the parameter. The sums along a dim that is divided are
    the same on all tensor ranks, and only the first saves them.
    """
    record, shards, divided = moment.record, [], moment.record.tensor_dim
    fused_tensors = len(record.placements)
    matrices = len(moment.counts) // fused_tensors  # per global tensor
    placements: tuple[list[Placement], list[Placement]] = ([], [])
    for number, placement in enumerate(record.placements):
        of_rows = _along(placement, 0, f"{placement.name}.second_moment_rows")
        of_columns = _along(placement, 1, f"{placement.name}.second_moment_columns")
        placements[0].append(of_rows)
        placements[1].append(
            replace(
                of_columns,
                global_shape=(matrices, *of_columns.global_shape),
                global_start=(0, *of_columns.global_start),
                local_start=(number * matrices, *of_columns.local_start),
                shape=(matrices, *of_columns.shape),
            )
        )
    for dim, sums in enumerate((moment.rows, moment.columns)):
        is_saved = divided in (None, dim) or first_tensor_rank
        meta = nn.Parameter(torch.empty(sums.shape, device="meta"), requires_grad=False)
        pseudo = replace(
            record,
            parameter=meta,
            placements=tuple(placements[dim]),
            counted=record.counted and is_saved,
        )
        shards.append(StateShard(pseudo, 0, {"exp_avg_sq": sums.view(-1)}))
    return tuple(shards)


def _along(placement: Placement, dim: int, name: str) -> Placement:
    """Return the placement of a tensor with one number per index of a dim."""
    return Placement(
        name,
        (placement.global_shape[dim],),
        (placement.global_start[dim],),
        (placement.local_start[dim],),
        (placement.shape[dim],),
    )


def _matrix_of_row(record: ParameterRecord) -> torch.Tensor:
    """Return [rows] int64: to which of the fused matrices each row of a parameter belongs."""
    rows = record.parameter.shape[0]
    fused = record.fused or (rows,)
    group = torch.repeat_interleave(torch.arange(len(fused)), torch.tensor(fused))
    return group.repeat(rows // sum(fused))


def _counts(record: ParameterRecord, matrices: int) -> list[float]:
    """Return the number of elements of each fused matrix, on all tensor ranks, without padding."""
    sizes = [float(prod(placement.global_shape)) for placement in record.placements]
    if len(sizes) == matrices:
        return sizes
    fused = record.fused
    return [sum(sizes) * rows / sum(fused) for rows in fused]


def _boxes(first: int, start: int, length: int, columns: int) -> Iterator[Box]:
    """Divide a range of a matrix into a part of a row, whole rows, and a part of a row.

    The range begins at `first` in this rank's optimizer interval, at `start` in the flattened
    matrix.
    """
    end = start + length
    while start < end:
        row, column = divmod(start, columns)
        if column or end - start < columns:
            size = min(columns - column, end - start)
            rows, width = slice(row, row + 1), slice(column, column + size)
        else:
            count = (end - start) // columns
            size = count * columns
            rows, width = slice(row, row + count), slice(0, columns)
        yield Box(slice(first, first + size), rows, width)
        first, start = first + size, start + size
