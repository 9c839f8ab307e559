"""Which part of a flat buffer each data-parallel rank holds: AMSP's three factors as intervals.

With factors p | g | o | D, the data rank r has four digits, the fastest first:

    a = r mod p    b = (r div p) mod (g/p)    c = (r div g) mod (o/g)    d = r div o

and of a buffer of n elements it holds

    parameters  n/p from  a n/p
    gradients   n/g from  a n/p + b n/g
    optimizer   n/o from  a n/p + b n/g + c n/o

Each interval lies inside the one above it and the next digit numbers its parts in order, so every
gather and every reduce-scatter runs along one digit, over contiguous parts, without re-ordering.
Neighbouring data ranks share a node, so digit a, which talks most, stays on the shortest links.

Source: AMSP (arXiv:2311.00257). It cuts optimizer states by whole tensors; here the elements of a
unit are cut, whatever tensor they belong to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

from frontier_llm.config.sharding import Factor, ShardingConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.grid import Coordinates, Grid

Digit = Literal["a", "b", "c", "d"]
DIGITS: tuple[Digit, ...] = ("a", "b", "c", "d")
_Written = dict[str, Factor]


class Digits(NamedTuple):
    """A data rank, written in the mixed radix of the factors."""

    a: int
    """Which interval of the parameters it holds."""
    b: int
    """Which part of that interval its gradients are."""
    c: int
    """Which part of that part its optimizer states are."""
    d: int
    """Which replica of all states it belongs to."""


class Interval(NamedTuple):
    """A contiguous part of a flat buffer, in elements."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        """The element after the last."""
        return self.start + self.length


@dataclass(frozen=True)
class Factors:
    """Over how many data-parallel ranks one copy of each model state is cut.

    Each divides the next. Ranks here are data ranks: positions in `Grid.data_group`.
    """

    params: int
    grads: int
    optimizer: int
    data: int
    """All data-parallel ranks."""

    def __post_init__(self) -> None:
        assert _is_chain((self.params, self.grads, self.optimizer, self.data)), self

    @classmethod
    def resolve(
        cls, config: ShardingConfig, data: int, ranks_per_node_on_data_axis: int | None
    ) -> "Factors":
        """Turn a configuration's `node` and `all` into integers.

        Args:
            config: three factors as a user writes them.
            data: number of data-parallel ranks.
            ranks_per_node_on_data_axis: what `node` stands for (`data_ranks_per_node`).

        Raises:
            ConfigError: a factor does not divide the next, or `node` stands for nothing.
        """
        words = {"all": data, "node": ranks_per_node_on_data_axis}
        written, numbers = _written(config), []
        for key, value in written.items():
            if value == "auto":
                raise ConfigError(
                    f"sharding.{key}",
                    "auto beside other factors",
                    "auto for all three factors, or for none",
                    "use sharding=amsp, or give three numbers",
                )
            number = words[value] if isinstance(value, str) else value
            if number is None:
                raise _uneven_nodes(key, data)
            numbers.append(number)
        if not _is_chain([*numbers, data]):
            raise _not_a_chain(written, numbers, data)
        params, grads, optimizer = numbers
        return cls(params, grads, optimizer, data)

    def padded(self, elements: int, block: int = 1) -> int:
        """Round a buffer's size up, so that each optimizer interval is whole blocks."""
        multiple = self.multiple(block)
        return -(-elements // multiple) * multiple

    def multiple(self, block: int = 1) -> int:
        """Return what a buffer's size is a multiple of.

        Args:
            block: elements that a quantiser treats as one.
        """
        return self.optimizer * block

    def digits(self, rank: int) -> Digits:
        """Write a data rank in digits."""
        a, b, c, d = ((rank // low) % (high // low) for low, high in self._chain)
        return Digits(a, b, c, d)

    def data_rank(self, digits: Digits) -> int:
        """Return the data rank that has these digits."""
        return sum(digit * low for digit, (low, _) in zip(digits, self._chain, strict=True))

    def width(self, digit: Digit) -> int:
        """Return how many values a digit takes: the ranks of a group along it."""
        low, high = self._chain["abcd".index(digit)]
        return high // low

    def group(self, digit: Digit, rank: int) -> tuple[int, ...]:
        """Return the data ranks that differ from `rank` in this digit only, in its order."""
        at = self.digits(rank)
        return tuple(self.data_rank(at._replace(**{digit: i})) for i in range(self.width(digit)))

    def params_interval(self, elements: int, rank: int) -> Interval:
        """Return what a data rank holds of the parameters of a buffer.

        Args:
            elements: of the buffer, padding included; a multiple of `multiple()`.
            rank: data rank.
        """
        return self._interval(elements, rank, depth=1)

    def grads_interval(self, elements: int, rank: int) -> Interval:
        """Return what a data rank holds of the reduced gradients; arguments as above."""
        return self._interval(elements, rank, depth=2)

    def optimizer_interval(self, elements: int, rank: int) -> Interval:
        """Return what a data rank updates: its master weights and moments; arguments as above."""
        return self._interval(elements, rank, depth=3)

    def params_holders(self, elements: int, element: int) -> tuple[int, ...]:
        """Return the data ranks that hold the parameter at one element of a buffer."""
        return self._holders(elements, element, depth=1)

    def grads_holders(self, elements: int, element: int) -> tuple[int, ...]:
        """Return the data ranks that hold the reduced gradient of one element."""
        return self._holders(elements, element, depth=2)

    def optimizer_holders(self, elements: int, element: int) -> tuple[int, ...]:
        """Return the data ranks that update one element: one a replica, replica 0's first."""
        return self._holders(elements, element, depth=3)

    @property
    def _chain(self) -> tuple[tuple[int, int], ...]:
        """For each digit: the ranks from one of its values to the next, and in all its values."""
        sizes = (1, self.params, self.grads, self.optimizer, self.data)
        return tuple(pairwise(sizes))

    def _interval(self, elements: int, rank: int, depth: int) -> Interval:
        """Follow the first `depth` digits of a rank into ever smaller parts of a buffer."""
        assert elements % self.optimizer == 0, f"{elements} elements are not padded for {self}"
        lengths = [elements // high for _, high in self._chain[:depth]]
        digits = self.digits(rank)[:depth]
        start = sum(digit * length for digit, length in zip(digits, lengths, strict=True))
        return Interval(start, lengths[-1])

    def _holders(self, elements: int, element: int, depth: int) -> tuple[int, ...]:
        """Find the first `depth` digits of an element; the others are free."""
        assert elements % self.optimizer == 0, f"{elements} elements are not padded for {self}"
        first, rest = 0, element
        for low, high in self._chain[:depth]:
            digit, rest = divmod(rest, elements // high)
            first += digit * low
        return tuple(range(first, self.data, self._chain[depth][0]))


def data_ranks_per_node(grid: Grid) -> int | None:
    """Return how many data ranks of one (tensor, pipeline) coordinate share a node.

    None: the borders of nodes do not cut the data axis into equal parts.
    """
    runs = set()
    for pipeline in range(grid.pipeline):
        for tensor in range(grid.tensor):
            group = grid.data_group(grid.rank(Coordinates(tensor, 0, pipeline)))
            runs |= {len(list(run)) for _, run in groupby(group, grid.node)}
    return runs.pop() if len(runs) == 1 else None


def _written(config: ShardingConfig) -> _Written:
    return {"params": config.params, "grads": config.grads, "optimizer": config.optimizer}


def _is_chain(numbers: Sequence[int]) -> bool:
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


def _not_a_chain(written: _Written, numbers: Sequence[int], data: int) -> ConfigError:
    """Name the first factor that breaks the chain, and the nearest chain that is one."""
    before, todo = 1, []
    broken: tuple[str, int, list[int]] | None = None
    for key, number in zip(written, numbers, strict=True):
        legal = [d for d in range(before, data + 1, before) if data % d == 0]
        # finer rather than coarser: what was to be saved stays saved
        before = min((d for d in legal if d >= number), default=data)
        if before != number:
            broken = broken or (key, number, legal)
            todo.append(f"sharding.{key}={before}")
    assert broken is not None
    key, number, legal = broken
    word = f" ({number})" if isinstance(written[key], str) else ""
    others = ", ".join(f"{k}={v}" for k, v in written.items() if k != key)
    return ConfigError(
        f"sharding.{key}",
        f"{written[key]}{word}, beside {others} on {data} data-parallel ranks",
        f"one of {', '.join(map(str, legal))}: params divides grads divides optimizer divides "
        f"the {data} ranks",
        f"set {' '.join(todo)}",
    )
