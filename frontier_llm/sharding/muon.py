"""Muon on whole matrices, and AdamW on all other parameters.

In shapes, n is the number of elements of a unit's flat buffer.
Sources: Jordan et al., Muon (https://kellerjordan.github.io/posts/muon), for the momentum and the
iteration; Liu et al., Muon is Scalable for LLM Training (arXiv:2502.16982, section 2.2), for weight
decay and the scale of the update.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

import torch

from frontier_llm.sharding.adamw import AdamW
from frontier_llm.sharding.unit import Unit
from frontier_llm.sharding.update_groups import Settings, UpdateRule, is_matrix_of_layer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration of Newton and Schulz, as Jordan et al. chose them."""
ITERATIONS = 5
MOMENTUM = 0.95
"""Default factor of the momentum of the previous step."""
UPDATE_RMS = 0.2
"""Root mean square of the elements of an update, near that of AdamW (arXiv:2502.16982)."""
NORM_EPSILON = 1e-7
"""Small number that is added to the norm of a matrix before the matrix is divided by it."""


def orthogonalise(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix with the same singular vectors, and singular values near 1.

    Args:
        matrix: [rows, columns] fp32.

    Returns:
        [rows, columns] fp32. The singular values lie between about 0.7 and 1.2, except those that
        are very small in relation to the norm of the matrix.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (torch.linalg.vector_norm(x) + NORM_EPSILON)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if is_tall else x


@dataclass(frozen=True)
class _Matrix:
    """A parameter that Muon updates. It may fuse several matrices."""

    index: int
    """Index of the unit."""
    part: slice
    """Its elements in the unit's buffer."""
    columns: int
    fused: tuple[int, ...]
    """As `ParameterRecord.fused`."""
    settings: Settings

    def direction(self, update: torch.Tensor) -> torch.Tensor:
        """Orthogonalise and scale each matrix of a flat tensor [elements] fp32."""
        rows = update.numel() // self.columns
        fused = self.fused or (rows,)
        groups = update.view(-1, sum(fused), self.columns)
        results = []
        for part in groups.split(fused, dim=1):
            matrix = orthogonalise(part.reshape(-1, self.columns))
            results.append((matrix * UPDATE_RMS * sqrt(max(matrix.shape))).view(part.shape))
        return torch.cat(results, dim=1).flatten()


class Muon(AdamW):
    """The optimizer states of this rank, which holds each unit whole.

    `exp_avgs` holds the momentum of the matrices of layers, and first moments of other parameters.
    `exp_avg_sqs` holds second moments; those of the matrices of layers are not used and stay 0.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        gradients: Sequence[torch.Tensor],
        rule: UpdateRule,
        separate_masters: bool = False,
    ) -> None:
        """Initialise master weights from the parameters, and momentum and moments with zeros.

        Args:
            units: the trainable units. The optimizer interval of each is the whole buffer.
            gradients: per unit, [n] fp32.
            rule: constants of AdamW's update; weight decay and rates also hold for Muon.
            separate_masters: whether master weights are a copy even if the parameters are fp32.
        """
        super().__init__(units, gradients, rule, separate_masters)
        self._momentum = MOMENTUM if rule.momentum is None else rule.momentum
        self._groups = [group for group in self._groups if not group.settings.is_orthogonal]
        self._matrices = list(_matrices(units, rule))

    def update(
        self,
        learning_rate: float,
        gradient_divisor: torch.Tensor,
        skip: torch.Tensor | None = None,
    ) -> None:
        """Update all states; the arguments are those of `AdamW.update`."""
        super().update(learning_rate, gradient_divisor, skip)
        for matrix in self._matrices:
            rate = learning_rate * matrix.settings.rate_factor
            master = self.masters[matrix.index][matrix.part]
            momentum = self.exp_avgs[matrix.index][matrix.part]
            gradient = self._gradients[matrix.index][matrix.part].div_(gradient_divisor)
            new_momentum = self._momentum * momentum + gradient
            direction = matrix.direction(gradient + self._momentum * new_momentum)
            new = master * (1 - rate * matrix.settings.weight_decay) - rate * direction
            if skip is not None:  # its value is not known to the host
                new = torch.where(skip > 0, master, new)
                new_momentum = torch.where(skip > 0, momentum, new_momentum)
            master.copy_(new)
            momentum.copy_(new_momentum)


def _matrices(units: Sequence[Unit], rule: UpdateRule) -> Iterator[_Matrix]:
    for number, unit in enumerate(units):
        assert unit.optimizer_interval.length == unit.layout.size, unit.name
        for record, start in zip(unit.records, unit.layout.starts, strict=True):
            if is_matrix_of_layer(record):
                shape = record.parameter.shape
                part = slice(start, start + shape.numel())
                yield _Matrix(number, part, shape[1], record.fused, Settings.of(record, rule))
