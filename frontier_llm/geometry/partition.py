"""Which part of a flat buffer each data-parallel rank holds: AMSP's three factors as intervals.

Write p, g, o for the factors (over how many ranks one copy of the parameters, the gradients and the
optimizer states is cut) and D for the number of data ranks; each divides the next. A data rank r is
written as four digits, like a time as seconds, minutes, hours and days. The first digit changes
from one rank to the next and counts to p; the second changes every p ranks and counts to g/p; the
third changes every g ranks and counts to o/g; the fourth changes every o ranks and counts to D/o:

    params     r mod p                  which interval of the parameters the rank holds
    grads      (r div p) mod (g/p)      which part of that interval its gradients are
    optimizer  (r div g) mod (o/g)      which part of that part its optimizer states are
    replica    r div o                  which replica of all states it belongs to

Of a buffer of n elements the rank holds

                      elements   first element
    parameters        n/p        params * n/p
    gradients         n/g        params * n/p + grads * n/g
    optimizer states  n/o        params * n/p + grads * n/g + optimizer * n/o

Each interval lies inside the one above it, and the next digit numbers its parts in order. So every
gather and every reduce-scatter runs among ranks that differ in one digit, over contiguous parts,
without re-ordering. Neighbouring data ranks share a node, so the params digit, whose ranks send the
most, stays inside nodes where possible.

Source: AMSP (arXiv:2311.00257). It divides optimizer states tensor by tensor; here the flat
buffer of a unit is divided, regardless of tensor borders.
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
_Written = dict[str, Factor]
"""The three factors by their keys, as the configuration has them."""


class Digits(NamedTuple):
    """The four digits of a data rank (see the module)."""

    params: int
    """Which interval of the parameters the rank holds."""
    grads: int
    """Which part of that interval its gradients are."""
    optimizer: int
    """Which part of that part its optimizer states are."""
    replica: int
    """Which replica of all states the rank belongs to."""


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
    """The numbers of data-parallel ranks over which one copy of each model state is divided.

    Each divides the next. "Rank" below means data rank: a position in `Grid.data_group`.
    """

    params: int
    grads: int
    optimizer: int
    data: int
    """Number of data-parallel ranks."""

    def __post_init__(self) -> None:
        assert _divide((self.params, self.grads, self.optimizer, self.data)), self

    @classmethod
    def resolve(
        cls, config: ShardingConfig, data: int, ranks_per_node_on_data_axis: int | None
    ) -> "Factors":
        """Turn a configuration's `node` and `all` into integers.

        Args:
            config: three factors, each an integer, `node` or `all`.
            data: number of data-parallel ranks.
            ranks_per_node_on_data_axis: the value of `node` (see `data_ranks_per_node`); None if
                it has none.

        Raises:
            ConfigError: a factor does not divide the next, or `node` is used and has no value.
        """
        words = {"all": data, "node": ranks_per_node_on_data_axis}
        written, numbers = _written(config), []
        for key, value in written.items():
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
            raise _indivisible(written, numbers, data)
        params, grads, optimizer = numbers
        return cls(params, grads, optimizer, data)

    def padded(self, elements: int, block: int = 1) -> int:
        """Round a buffer's size up to a multiple of `multiple(block)`."""
        multiple = self.multiple(block)
        return -(-elements // multiple) * multiple

    def multiple(self, block: int = 1) -> int:
        """Return the number of elements that must divide a buffer's size.

        Args:
            block: elements per quantisation block: each optimizer interval is a multiple of it, and
                of ALIGNED_ELEMENTS.
        """
        return self.optimizer * math.lcm(block, ALIGNED_ELEMENTS)

    def digits(self, rank: int) -> Digits:
        """Return the digits of a data rank."""
        return Digits(*((rank // low) % (high // low) for low, high in self._strides))

    def data_rank(self, digits: Digits) -> int:
        """Return the data rank that has these digits."""
        return sum(digit * low for digit, (low, _) in zip(digits, self._strides, strict=True))

    def width(self, digit: Digit) -> int:
        """Return how many values a digit takes: the number of ranks in a group along it."""
        low, high = self._strides[DIGITS.index(digit)]
        return high // low

    def stride(self, digit: Digit) -> int:
        """Return the distance between ranks whose digit differs by one."""
        return self._strides[DIGITS.index(digit)][0]

    def group(self, digit: Digit, rank: int) -> tuple[int, ...]:
        """Return the data ranks that differ from `rank` in this digit only, ordered by it."""
        digits = self.digits(rank)
        return tuple(
            self.data_rank(digits._replace(**{digit: i})) for i in range(self.width(digit))
        )

    def params_interval(self, elements: int, rank: int) -> Interval:
        """Return the interval of a buffer whose parameters a data rank holds.

        Args:
            elements: size of the buffer with padding; a multiple of `multiple()`.
            rank: data rank.
        """
        return self._interval(elements, rank, depth=1)

    def grads_interval(self, elements: int, rank: int) -> Interval:
        """Return the interval whose reduced gradients a data rank holds; arguments as above."""
        return self._interval(elements, rank, depth=2)

    def optimizer_interval(self, elements: int, rank: int) -> Interval:
        """Return the interval that a data rank updates; arguments as above."""
        return self._interval(elements, rank, depth=3)

    def params_holders(self, elements: int, element: int) -> tuple[int, ...]:
        """Return the data ranks that hold the parameter at one element of a buffer."""
        return self._holders(elements, element, depth=1)

    def grads_holders(self, elements: int, element: int) -> tuple[int, ...]:
        """Return the data ranks that hold the reduced gradient of one element."""
        return self._holders(elements, element, depth=2)

    def optimizer_holders(self, elements: int, element: int) -> tuple[int, ...]:
        """Return the data ranks that update one element: one per replica, replica 0 first."""
        return self._holders(elements, element, depth=3)

    @property
    def _strides(self) -> tuple[tuple[int, int], ...]:
        """The stride of each digit, and the stride of the next one."""
        sizes = (1, self.params, self.grads, self.optimizer, self.data)
        return tuple(pairwise(sizes))

    def _interval(self, elements: int, rank: int, depth: int) -> Interval:
        """Return the interval that the first `depth` digits of a rank select."""
        assert elements % self.optimizer == 0, f"{elements} elements are not padded for {self}"
        lengths = [elements // high for _, high in self._strides[:depth]]
        digits = self.digits(rank)[:depth]
        start = sum(digit * length for digit, length in zip(digits, lengths, strict=True))
        return Interval(start, lengths[-1])

    def _holders(self, elements: int, element: int, depth: int) -> tuple[int, ...]:
        """Return the ranks whose first `depth` digits select an interval with this element."""
        assert elements % self.optimizer == 0, f"{elements} elements are not padded for {self}"
        first, rest = 0, element
        for low, high in self._strides[:depth]:
            digit, rest = divmod(rest, elements // high)
            first += digit * low
        return tuple(range(first, self.data, self._strides[depth][0]))


def data_ranks_per_node(grid: Grid) -> int | None:
    """Return how many data ranks of one (tensor, pipeline) coordinate share a node.

    None if that number differs between nodes or coordinates.
    """
    runs = set()
    for pipeline in range(grid.pipeline):
        for tensor in range(grid.tensor):
            group = grid.data_group(grid.rank(Coordinates(tensor, 0, pipeline)))
            runs |= {len(list(run)) for _, run in groupby(group, grid.node)}
    return runs.pop() if len(runs) == 1 else None


def _written(config: ShardingConfig) -> _Written:
    return {"params": config.params, "grads": config.grads, "optimizer": config.optimizer}


def _divide(numbers: Sequence[int]) -> bool:
    """Whether all numbers are positive and each divides the next."""
    return min(numbers) > 0 and all(after % before == 0 for before, after in pairwise(numbers))


def _uneven_nodes(key: str, data: int) -> ConfigError:
    legal = ", ".join(str(d) for d in range(1, data + 1) if data % d == 0)
    return ConfigError(
        f"sharding.{key}",
        "node",
        f"nodes that each hold equally many of the {data} data-parallel ranks of a stage",
        f"set sharding.{key} to one of {legal}, or change parallel.tensor, parallel.pipeline or "
        "launch.ranks_per_node",
    )


def _indivisible(written: _Written, numbers: Sequence[int], data: int) -> ConfigError:
    """Name the first factor that does not divide the next, and the nearest factors that do."""
    before, todo = 1, []
    broken: tuple[str, int, list[int]] | None = None
    for key, number in zip(written, numbers, strict=True):
        legal = [d for d in range(before, data + 1, before) if data % d == 0]
        # round up, so that no state takes more memory than was asked for
        before = min((d for d in legal if d >= number), default=data)
        if before != number:
            broken = broken or (key, number, legal)
            todo.append(f"sharding.{key}={before}")
    assert broken is not None
    key, number, legal = broken
    resolved = f" ({number})" if isinstance(written[key], str) else ""
    others = ", ".join(f"{k}={v}" for k, v in written.items() if k != key)
    return ConfigError(
        f"sharding.{key}",
        f"{written[key]}{resolved}, with {others} on {data} data-parallel ranks",
        f"one of {', '.join(map(str, legal))}: params divides grads divides optimizer divides "
        f"the {data} ranks",
        f"set {' '.join(todo)}",
    )
