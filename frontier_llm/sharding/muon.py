"""Muon on whole matrices, and AdamW on all other parameters.

Sources: Jordan et al., Muon (https://kellerjordan.github.io/posts/muon), for the momentum and the
iteration; Liu et al., Muon is Scalable for LLM Training (arXiv:2502.16982, section 2.2), for weight
decay and the scale of the update.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from typing_extensions import override

from frontier_llm.collectives.primitives import all_gather
from frontier_llm.sharding.adamw import AdamW
from frontier_llm.sharding.optimizer_states import Setup
from frontier_llm.sharding.unit import Unit
from frontier_llm.sharding.update_groups import Settings, UpdateRule

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration of Newton and Schulz, as Jordan et al. chose them."""
ITERATIONS = 5
MOMENTUM = 0.95
"""Default factor of the momentum of the previous step."""
UPDATE_RMS = 0.2
"""Root mean square of the elements of an update, near that of AdamW (arXiv:2502.16982)."""
NORM_EPSILON = 1e-7
"""Small number that is added to the norm of a matrix before the matrix is divided by it."""


def orthogonalise(matrix: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a matrix in fp32 with the same singular vectors, and singular values near 1.

    The singular values lie between about 0.7 and 1.2, except those that are very small in relation
    to the norm of the matrix. Products have the given dtype; Jordan et al. compute them in bf16.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = (x / (torch.linalg.vector_norm(x) + NORM_EPSILON)).to(dtype)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if is_tall else x).float()


@dataclass(frozen=True)
class _Matrix:
    """A parameter that Muon updates, on a rank that holds its states. It may fuse matrices."""

    index: int
    """Index of the unit."""
    part: slice
    """Its elements in the unit's optimizer interval."""
    shape: torch.Size
    cut: int | None
    """The dim that tensor parallelism divides; None = none."""
    fused: tuple[int, ...]
    """As `ParameterRecord.fused`."""
    settings: Settings
    dtype: torch.dtype
    """Dtype of the products: fp32 if the model computes in fp32, else bf16."""

    def direction(self, update: torch.Tensor) -> torch.Tensor:
        """Orthogonalise and scale each of the matrices in [rows, columns] fp32."""
        fused = self.fused or (len(update),)
        groups = update.view(-1, sum(fused), update.shape[1])
        results = []
        for part in groups.split(fused, dim=1):
            matrix = orthogonalise(part.reshape(-1, update.shape[1]), self.dtype)
            results.append((matrix * UPDATE_RMS * sqrt(max(matrix.shape))).view(part.shape))
        return torch.cat(results, dim=1).view(update.shape)


class Muon(AdamW):
    """The states of a rank that holds all elements of a matrix of a layer, or none.

    If tensor parallelism divides a matrix, each tensor rank holds the states of its part. The
    update, before it is orthogonalised, is gathered from them.

    `exp_avgs` holds the momentum of the matrices of layers, and first moments of other parameters.
    `exp_avg_sqs` holds the second moments of the other parameters, which follow the matrices.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        rule, self._transport = setup.rule, setup.transport
        self._tensor_group = setup.groups.tensor_group
        self._momentum = MOMENTUM if rule.momentum is None else rule.momentum
        self._groups = [group for group in self._groups if not group.settings.is_orthogonal]
        self._matrices = list(_matrices(setup.units, rule))

    @override
    def update(
        self, learning_rate: float, gradient_divisor: torch.Tensor, skip: torch.Tensor
    ) -> None:
        """Update all states; collective over the tensor ranks."""
        waiting: deque[tuple[_Matrix, torch.Tensor, Callable[[], torch.Tensor]]] = deque()
        for matrix in self._matrices:
            momentum = self.exp_avgs[matrix.index][matrix.part]
            gradient = self._gradients[matrix.index][matrix.part].div_(gradient_divisor)
            new_momentum = self._momentum * momentum + gradient
            update = (gradient + self._momentum * new_momentum).view(matrix.shape)
            waiting.append((matrix, new_momentum, self._start_gather(update, matrix.cut)))
            if len(waiting) > 1:  # one matrix is gathered while another one is orthogonalised
                self._move(*waiting.popleft(), learning_rate, skip)
        while waiting:
            self._move(*waiting.popleft(), learning_rate, skip)
        super().update(learning_rate, gradient_divisor, skip)

    def _move(
        self,
        matrix: _Matrix,
        new_momentum: torch.Tensor,
        gathered: Callable[[], torch.Tensor],
        learning_rate: float,
        skip: torch.Tensor,
    ) -> None:
        rate = learning_rate * matrix.settings.rate_factor
        master = self.masters[matrix.index][matrix.part]
        momentum = self.exp_avgs[matrix.index][matrix.part]
        direction = matrix.direction(gathered())
        if matrix.cut is not None:
            group = self._tensor_group
            direction = direction.chunk(group.size(), matrix.cut)[group.rank()]
        direction = direction.flatten()
        new = master * (1 - rate * matrix.settings.weight_decay) - rate * direction
        # the host does not know the value of `skip`
        master.copy_(torch.where(skip > 0, master, new))
        momentum.copy_(torch.where(skip > 0, momentum, new_momentum))

    def _start_gather(self, part: torch.Tensor, dim: int | None) -> Callable[[], torch.Tensor]:
        """Begin to gather a matrix that tensor ranks divide along a dim; collective over them.

        Return a function that waits, and returns the whole matrix. This rank's part must not be
        touched until then.
        """
        group, traffic = self._tensor_group, self._transport.traffic
        if dim is None or group.size() == 1:
            return lambda: part
        buffer = part.new_empty(group.size(), part.numel())
        buffer[group.rank()] = part.flatten()
        pairwise = self._transport.pairwise
        work = all_gather(buffer.view(-1), group, traffic, "whole_matrices", pairwise=pairwise)

        def result() -> torch.Tensor:
            work.wait()
            return torch.cat([row.view(part.shape) for row in buffer], dim=dim)

        return result

    @override
    def _without_second_moment(self, unit: Unit) -> int:
        own = unit.optimizer_interval
        return max(0, min(unit.layout.whole, own.stop) - own.start)


def _matrices(units: Sequence[Unit], rule: UpdateRule) -> Iterator[_Matrix]:
    for number, unit in enumerate(units):
        own = unit.optimizer_interval
        for index, held, start in unit.held_parameters():
            record = unit.records[index]
            if record.is_matrix_of_layer:
                shape, first = record.parameter.shape, held.start - own.start
                assert (start, held.length) == (0, shape.numel()), record.name
                part = slice(first, first + held.length)
                settings = Settings.of(record, rule)
                is_fp32 = record.parameter.dtype == torch.float32
                dtype = torch.float32 if is_fp32 else torch.bfloat16
                yield _Matrix(number, part, shape, record.tensor_dim, record.fused, settings, dtype)
