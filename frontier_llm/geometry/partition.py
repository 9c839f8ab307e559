"""Decide which part of a flat buffer each data-parallel rank stores.

One copy of the parameters is divided over p data ranks, one copy of the gradients over g ranks, and
one copy of the optimizer states over o ranks. These are the sharding factors. D is the number of
data ranks. p divides g, g divides o, and o divides D.

A data rank r is written as four digits, as a time is written as seconds, minutes, hours and days:

    digit      value                  range         changes
    params     r mod p                0 ... p-1     from one rank to the next
    grads      (r div p) mod (g/p)    0 ... g/p-1   every p ranks
    optimizer  (r div g) mod (o/g)    0 ... o/g-1   every g ranks
    replica    r div o                0 ... D/o-1   every o ranks

The digits select the intervals of a buffer of n elements that the rank stores:

    state             elements   first element
    parameters        n/p        params * n/p
    gradients         n/g        params * n/p + grads * n/g
    optimizer states  n/o        params * n/p + grads * n/g + optimizer * n/o

The gradient interval is a part of the parameter interval, and the digit `grads` is the number of
this part. In the same way, `optimizer` is the number of a part of the gradient interval. Every
gather and every reduce-scatter therefore runs between ranks that differ in a single digit, and over
contiguous parts, so that nothing has to be re-ordered. Neighbouring data ranks share a node. Groups
along the digit `params`, which send the most, therefore stay inside a node where possible.

The factors come from AMSP (arXiv:2311.00257). AMSP divides optimizer states tensor by tensor. Here
the flat buffer of a unit is divided, regardless of the borders between tensors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal, NamedTuple, get_args

from frontier_llm.config.sharding import Factor, ShardingConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.grid import Coordinates, Grid

Digit = Literal["params", "grads", "optimizer", "replica"]
ALIGNED_ELEMENTS = 64
"""Every interval has a multiple of this many elements, 128 bytes of bf16, so that copies, kernels
and collectives of a GPU find it aligned."""
DIGITS: tuple[Digit, ...] = get_args(Digit)
_ConfiguredFactors = dict[str, Factor]
"""The three factors of a configuration by their keys, as integers or as words."""


class Digits(NamedTuple):
    """The four digits of a data rank, as the docstring of this module defines them."""

    params: int
    """Number of the parameter interval that the rank stores."""
    grads: int
    """Number of the part of the parameter interval whose gradients the rank stores."""
    optimizer: int
    """Number of the part of the gradient interval whose optimizer states the rank stores."""
    replica: int
    """Number of the replica to which the rank belongs."""


class Interval(NamedTuple):
    """A contiguous part of a flat buffer, in elements."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        """Index of the element after the last one."""
        return self.start + self.length


@dataclass(frozen=True)
class Factors:
    """The sharding factors: over how many data ranks one copy of each model state is divided.

    Each factor divides the next one, and the last divides `data`. In this class, "rank" means a
    data rank, which is a position in `Grid.data_group`.
    """

    params: int
    grads: int
    optimizer: int
    data: int
    """Number of data-parallel ranks."""
    divides_sums: bool = False
    """Whether sums over replicas are computed in parts, one part per replica. Optimizer intervals
    are then padded so that they can be divided."""

    def __post_init__(self) -> None:
        assert _divide((self.params, self.grads, self.optimizer, self.data)), self

    @classmethod
    def resolve(
        cls, config: ShardingConfig, data: int, ranks_per_node_on_data_axis: int | None
    ) -> "Factors":
        """Replace the words `node` and `all` in a configuration by integers.

        Args:
            config: three factors, each an integer, `node` or `all`.
            data: number of data-parallel ranks.
            ranks_per_node_on_data_axis: the integer for `node`, as `data_ranks_per_node` returns
                it; None if nodes have different numbers of data ranks.

        Raises:
            ConfigError: a factor does not divide the next one, or `node` is configured but nodes
                have different numbers of data ranks.
        """
        words = {"all": data, "node": ranks_per_node_on_data_axis}
        configured, numbers = _configured(config), []
        for key, value in configured.items():
            if value == "auto":
                raise ConfigError(
                    f"sharding.{key}",
                    "auto, but not for all three factors",
                    "auto for all three factors, or for none",
                    "use sharding=amsp, or give three numbers",
                )
            number = words[value] if isinstance(value, str) else value
            if number is None:
                raise _uneven_nodes(key, data)
            numbers.append(number)
        if not _divide([*numbers, data]):
            raise _indivisible(configured, numbers, data)
        params, grads, optimizer = numbers
        return cls(params, grads, optimizer, data)

    def padded(self, elements: int, block: int = 1) -> int:
        """Round the size of a buffer up to a multiple of `multiple(block)`."""
        multiple = self.multiple(block)
        return -(-elements // multiple) * multiple

    def multiple(self, block: int = 1) -> int:
        """Return the number of elements that must divide the size of a buffer.

        Args:
            block: each optimizer interval is a multiple of this number of elements, for example of
                a quantisation block, and of ALIGNED_ELEMENTS. If sums are divided, each part of an
                optimizer interval is.
        """
        parts = self.data if self.divides_sums else self.optimizer
        return parts * math.lcm(block, ALIGNED_ELEMENTS)

    def digits(self, rank: int) -> Digits:
        """Return the digits of a data rank."""
        return Digits(*((rank // low) % (high // low) for low, high in self._strides))

    def data_rank(self, digits: Digits) -> int:
        """Return the data rank that has these digits."""
        return sum(digit * low for digit, (low, _) in zip(digits, self._strides, strict=True))

    def width(self, digit: Digit) -> int:
        """Return the number of values of a digit, which is the number of ranks in its groups."""
        low, high = self._strides[DIGITS.index(digit)]
        return high // low

    def stride(self, digit: Digit) -> int:
        """Return the distance between two data ranks whose digit differs by one."""
        return self._strides[DIGITS.index(digit)][0]

    def group(self, digit: Digit, rank: int) -> tuple[int, ...]:
        """Return the data ranks that differ from `rank` only in `digit`, in its order."""
        digits = self.digits(rank)
        return tuple(
            self.data_rank(digits._replace(**{digit: i})) for i in range(self.width(digit))
        )

    def params_interval(self, elements: int, rank: int) -> Interval:
        """Return the interval of a buffer whose parameters a data rank stores.

        Args:
            elements: size of the buffer, padding included; a multiple of `multiple()`.
            rank: data rank.
        """
        return self._interval(elements, rank, depth=1)

    def grads_interval(self, elements: int, rank: int) -> Interval:
        """Return the interval of a buffer whose summed gradients a data rank stores.

        The arguments are those of `params_interval`.
        """
        return self._interval(elements, rank, depth=2)

    def optimizer_interval(self, elements: int, rank: int) -> Interval:
        """Return the interval of a buffer whose optimizer states a data rank stores and updates.

        The arguments are those of `params_interval`.
        """
        return self._interval(elements, rank, depth=3)

    def params_holders(self, elements: int, element: int) -> tuple[int, ...]:
        """Return the data ranks that store the parameter at one element of a buffer."""
        return self._holders(elements, element, depth=1)

    def grads_holders(self, elements: int, element: int) -> tuple[int, ...]:
        """Return the data ranks that store the summed gradient of one element."""
        return self._holders(elements, element, depth=2)

    def optimizer_holders(self, elements: int, element: int) -> tuple[int, ...]:
        """Return the data ranks that update one element: one rank per replica, replica 0 first."""
        return self._holders(elements, element, depth=3)

    @property
    def _strides(self) -> tuple[tuple[int, int], ...]:
        """For each digit, its stride and the stride of the next digit."""
        sizes = (1, self.params, self.grads, self.optimizer, self.data)
        return tuple(pairwise(sizes))

    def _interval(self, elements: int, rank: int, depth: int) -> Interval:
        """Return the interval that is selected by the first `depth` digits of a rank."""
        assert elements % self.optimizer == 0, f"{elements} elements are not padded for {self}"
        lengths = [elements // high for _, high in self._strides[:depth]]
        digits = self.digits(rank)[:depth]
        start = sum(digit * length for digit, length in zip(digits, lengths, strict=True))
        return Interval(start, lengths[-1])

    def _holders(self, elements: int, element: int, depth: int) -> tuple[int, ...]:
        """Return the ranks whose first `depth` digits select the interval with this element."""
        assert elements % self.optimizer == 0, f"{elements} elements are not padded for {self}"
        first_rank, offset = 0, element
        for low, high in self._strides[:depth]:
            digit, offset = divmod(offset, elements // high)
            first_rank += digit * low
        return tuple(range(first_rank, self.data, self._strides[depth][0]))


def data_ranks_per_node(grid: Grid) -> int | None:
    """Return the number of data ranks with equal tensor and pipeline coordinate on one node.

    The result is None if this number differs between nodes or between coordinates, so that
    "the data ranks of a node" has no meaning.
    """
    counts: set[int] = set()
    for pipeline in range(grid.pipeline):
        for tensor in range(grid.tensor):
            group = grid.data_group(grid.rank(Coordinates(tensor, 0, pipeline)))
            counts |= {len(list(neighbours)) for _, neighbours in groupby(group, grid.node)}
    return counts.pop() if len(counts) == 1 else None


def _configured(config: ShardingConfig) -> _ConfiguredFactors:
    return {"params": config.params, "grads": config.grads, "optimizer": config.optimizer}


def _divide(numbers: Sequence[int]) -> bool:
    """Whether all numbers are positive and each number divides the next one."""
    return min(numbers) > 0 and all(after % before == 0 for before, after in pairwise(numbers))


def _uneven_nodes(key: str, data: int) -> ConfigError:
    legal = ", ".join(str(d) for d in range(1, data + 1) if data % d == 0)
    return ConfigError(
        f"sharding.{key}",
        "node",
        f"nodes with equal numbers of the {data} data-parallel ranks of a stage",
        f"set sharding.{key} to one of {legal}, or change parallel.tensor, parallel.pipeline or "
        "launch.ranks_per_node",
    )


def _indivisible(configured: _ConfiguredFactors, numbers: Sequence[int], data: int) -> ConfigError:
    """Return an error that names the first wrong factor and the nearest factors that are legal."""
    factor, overrides = 1, []
    first_wrong: tuple[str, int, list[int]] | None = None
    for key, number in zip(configured, numbers, strict=True):
        legal = [d for d in range(factor, data + 1, factor) if data % d == 0]
        # round up, so that no state takes more memory than with the configured factor
        factor = min((d for d in legal if d >= number), default=data)
        if factor != number:
            first_wrong = first_wrong or (key, number, legal)
            overrides.append(f"sharding.{key}={factor}")
    assert first_wrong is not None
    key, number, legal = first_wrong
    resolved = f" ({number})" if isinstance(configured[key], str) else ""
    others = ", ".join(f"{name}={value}" for name, value in configured.items() if name != key)
    return ConfigError(
        f"sharding.{key}",
        f"{configured[key]}{resolved}, with {others} on {data} data-parallel ranks",
        f"one of {', '.join(map(str, legal))}: params divides grads divides optimizer divides "
        f"the {data} ranks",
        f"set {' '.join(overrides)}",
    )
