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

The gradient interval is a part of the parameter interval, and the digit `grads` is the index of
this part. In the same way, `optimizer` is the index of a part of the gradient interval. Every
gather and every reduce-scatter therefore runs between ranks that differ in a single digit, and over
contiguous parts, so that nothing has to be re-ordered. Neighbouring data ranks share a node. Groups
along the digit `params`, which send the most, therefore stay inside a node where possible.

If ranks send messages directly to all other ranks of a group, a group over several nodes sends far
more bytes between nodes than necessary. A digit is then divided into *hops* at the borders of
packages (devices of a node with faster links between them) and of nodes. The first hop runs inside
a package or node, the next one between them. Each hop is a digit of its own: the ranks of its
groups differ only in this hop. The first hop divides an interval into parts, and the next one
divides each part. Example: a digit has 8 values, which are 2 nodes of 4 data ranks. The first hop
runs between the 4 ranks of a node and divides an interval into 4 parts. The second hop runs between
the 2 ranks at the same place of both nodes and divides a part into 2.

The factors come from AMSP (arXiv:2311.00257). AMSP divides optimizer states tensor by tensor. Here
the flat buffer of a unit is divided, regardless of the borders between tensors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from frontier_llm.config.sharding import Factor, ShardingConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.grid import Grid, data_ranks_per_node, data_ranks_per_package

Digit = Literal["params", "grads", "optimizer", "replica"]
ALIGNED_ELEMENTS = 64
"""Every interval has a multiple of this many elements, 128 bytes of bf16, so that copies, kernels
and collectives of a GPU find it aligned."""
DIGITS: tuple[Digit, ...] = get_args(Digit)
_ConfiguredFactors = dict[str, Factor]
"""The three factors of a configuration by their keys, as integers or as words."""
Survives = Literal["nothing", "rank", "node"]
"""The largest part of a job that may be lost at once."""
ORDER: tuple[Survives, ...] = ("nothing", "rank", "node")


class Digits(NamedTuple):
    """The four digits of a data rank: which parts of its buffers it stores (see the module)."""

    params: int
    grads: int
    optimizer: int
    replica: int


class Hop(NamedTuple):
    """A digit, or the part of a digit between two borders: its groups run one collective."""

    digit: Digit
    low: int
    """Distance between neighbouring data ranks of a group."""
    high: int
    """Distance at which the next hop begins. The hop divides an interval of n/low elements into
    parts of n/high elements."""

    @property
    def width(self) -> int:
        """Number of ranks in a group."""
        return self.high // self.low

    def value(self, rank: int) -> int:
        """Return the position of a data rank in its group."""
        return rank // self.low % self.width

    def group(self, rank: int) -> tuple[int, ...]:
        """Return the data ranks of a data rank's group, in the order of the parts that they own."""
        first = rank - self.value(rank) * self.low
        return tuple(range(first, first + self.high, self.low))


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
    """Over how many data ranks ("ranks" in this class) one copy of each model state is divided.

    Each factor divides the next one, and the last divides `data`.
    """

    params: int
    grads: int
    optimizer: int
    data: int
    divides_sums: bool = False
    """Whether sums over replicas are computed in parts, for which intervals are padded."""
    borders: tuple[int, ...] = ()
    """Numbers of data ranks in a package and in a node, ascending, at which digits are divided into
    hops."""

    def __post_init__(self) -> None:
        assert _divide((self.params, self.grads, self.optimizer, self.data)), self

    @classmethod
    def resolve(cls, config: ShardingConfig, grid: Grid) -> "Factors":
        """Replace the words `package`, `node` and `all` in a configuration by integers.

        Raises:
            ConfigError: a factor does not divide the next one, or `package` or `node` is configured
                but packages or nodes have different numbers of data ranks.
        """
        data = grid.data
        words = {
            "all": data,
            "node": data_ranks_per_node(grid),
            "package": data_ranks_per_package(grid),
        }
        configured: _ConfiguredFactors = {
            "params": config.params, "grads": config.grads, "optimizer": config.optimizer
        }  # fmt: skip
        numbers = []
        for key, value in configured.items():
            if value == "auto":  # if all three are auto, the planner has replaced them already
                raise ConfigError(
                    f"sharding.{key}",
                    "auto, but not for all three factors",
                    "auto for all three factors, or for none",
                    "use sharding=amsp, or give three numbers",
                )
            number = words[value] if isinstance(value, str) else value
            if number is None:
                raise _uneven(key, str(value), data)
            numbers.append(number)
        if not _divide([*numbers, data]):
            raise _indivisible(configured, numbers, data)
        params, grads, optimizer = numbers
        return cls(params, grads, optimizer, data)

    @property
    def by_key(self) -> dict[str, int]:
        """The factors by the names of their keys."""
        return {"params": self.params, "grads": self.grads, "optimizer": self.optimizer}

    @property
    def in_words(self) -> str:
        """The factors of parameters, gradients and optimizer states: `1/8/16`."""
        return f"{self.params}/{self.grads}/{self.optimizer}"

    def padded(self, elements: int) -> int:
        """Round the size of a buffer up to a multiple of `multiple()`."""
        multiple = self.multiple()
        return -(-elements // multiple) * multiple

    def multiple(self) -> int:
        """Return the number of elements that must divide the size of a buffer.

        The length of each optimizer interval, and if sums over replicas are divided that of each
        part of an interval, is a multiple of ALIGNED_ELEMENTS.
        """
        return (self.data if self.divides_sums else self.optimizer) * ALIGNED_ELEMENTS

    def digits(self, rank: int) -> Digits:
        """Return the digits of a data rank."""
        return Digits(*((rank // low) % (high // low) for low, high in self._strides))

    def width(self, digit: Digit) -> int:
        """Return the number of values of a digit."""
        low, high = self._strides[DIGITS.index(digit)]
        return high // low

    def whole(self, digit: Digit) -> Hop:
        """Return a digit as a single hop, whether or not borders divide it."""
        return Hop(digit, *self._strides[DIGITS.index(digit)])

    def hops(self, digit: Digit) -> tuple[Hop, ...]:
        """Return the hops of a digit, from the nearest to the farthest; empty if it has one value.

        A reduce-scatter takes the hops in this order, an all-gather in the reverse order.
        """
        return self._hops[DIGITS.index(digit)]

    @cached_property
    def collective_hops(self) -> tuple[Hop, ...]:
        """The hops along which collectives run, in the order of the reduction of gradients.

        If sums over replicas are not divided, they are one collective.
        """
        hops = self._all_hops
        if self.divides_sums or self.optimizer == self.data:
            return hops
        return (*(hop for hop in hops if hop.digit != "replica"), self.whole("replica"))

    def interval(self, elements: int, rank: int, ranks: int) -> Interval:
        """Return the interval of a data rank in a padded buffer that is divided over `ranks` ranks.

        The first `ranks` data ranks hold one copy of the buffer, the next `ranks` the next copy.
        `ranks` is 1, or the `high` of a hop.
        """
        assert elements % ranks == 0, f"{elements} elements are not padded for {self}"
        hops = (hop for hop in self._all_hops if hop.high <= ranks)
        start = sum(hop.value(rank) * (elements // hop.high) for hop in hops)
        return Interval(start, elements // ranks)

    @property
    def _strides(self) -> tuple[tuple[int, int], ...]:
        """For each digit, its stride and the stride of the next digit."""
        sizes = (1, self.params, self.grads, self.optimizer, self.data)
        return tuple(pairwise(sizes))

    @cached_property
    def _all_hops(self) -> tuple[Hop, ...]:
        return tuple(hop for hops in self._hops for hop in hops)

    @cached_property
    def _hops(self) -> tuple[tuple[Hop, ...], ...]:
        """The hops of each digit, in the order of DIGITS."""
        return tuple(
            tuple(self._divided(digit, low, high)) if high > low else ()
            for digit, (low, high) in zip(DIGITS, self._strides, strict=True)
        )

    def _divided(self, digit: Digit, low: int, high: int) -> Iterator[Hop]:
        for border in self.borders:
            if low < border < high and border % low == 0 and high % border == 0:
                yield Hop(digit, low, border)
                low = border
        yield Hop(digit, low, high)


def _divide(numbers: Sequence[int]) -> bool:
    """Whether all numbers are positive and each number divides the next one."""
    return min(numbers) > 0 and all(after % before == 0 for before, after in pairwise(numbers))


def _uneven(key: str, word: str, data: int) -> ConfigError:
    legal = ", ".join(str(d) for d in range(1, data + 1) if data % d == 0)
    return ConfigError(
        f"sharding.{key}",
        word,
        f"{word}s with equal numbers of the {data} data-parallel ranks of a stage",
        f"set sharding.{key} to one of {legal}, or change parallel.tensor, parallel.pipeline or "
        "launch.ranks_per_node",
    )


def _indivisible(configured: _ConfiguredFactors, numbers: Sequence[int], data: int) -> ConfigError:
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


@dataclass(frozen=True)
class Cut:
    """The intervals of the flat buffer of one unit.

    The intervals of a buffer usually have equal lengths. An optimizer such as Muon updates whole
    matrices, so that no interval may end inside a matrix. Then the *bounds* of the optimizer
    intervals are chosen by `whole_bounds`, and their lengths differ: on some ranks a unit has no
    elements at all. Over all units of a rank, the numbers of elements are nearly equal. The
    intervals of parameters and gradients are unions of neighbouring optimizer intervals.
    """

    factors: Factors
    size: int
    bounds: tuple[int, ...] = ()
    """First element of each optimizer interval, in the order of the buffer, and at last `size`;
    empty = equal intervals."""

    def interval(self, rank: int, ranks: int) -> Interval:
        """Return the interval of a data rank, as `Factors.interval` does.

        If intervals differ in length, `ranks` is at most the factor of the optimizer states.
        """
        if not self.bounds:
            return self.factors.interval(self.size, rank, ranks)
        first, count = self.factors.interval(self.factors.optimizer, rank, ranks)
        start = self.bounds[first]
        return Interval(start, self.bounds[first + count] - start)

    def parts(self, rank: int, whole: int, parts: int) -> tuple[int, ...]:
        """Return where the interval of a data rank, of a buffer divided over `whole`, is divided.

        The result has the first element of each smaller interval, of a buffer divided over `parts`
        ranks, counted from the start of the interval, and the length of the interval. It is empty
        if the smaller intervals have equal lengths.
        """
        if not self.bounds:
            return ()
        first, count = self.factors.interval(self.factors.optimizer, rank, whole)
        bounds = self.bounds[first : first + count + 1 : self.factors.optimizer // parts]
        return tuple(bound - bounds[0] for bound in bounds)


@lru_cache(maxsize=64)
def whole_bounds(
    units: tuple[tuple[tuple[int, ...], int], ...], parts: int
) -> tuple[tuple[int, ...], ...]:
    """Divide buffers into `parts` intervals that do not end inside a matrix; return `Cut.bounds`.

    Buffer by buffer, the matrices are given to ranks in the order of the intervals. The first ranks
    take as many as they can below a limit on the elements of a rank, which is as low as possible.

    `units` has for each buffer the first element of each matrix that stays whole, and the size of
    the buffer, padding included. What follows the last matrix stays with it. Buffers without such a
    matrix have equal intervals.
    """
    loads, found = [0] * parts, list[tuple[int, ...]]()
    for starts, size in units:
        borders = (*starts, size)
        if not starts:
            found.append(())
            continue
        low, high = 0, max(loads) + size
        while low < high:
            limit = (low + high) // 2
            is_enough = _filled(borders, loads, limit)[-1] == size
            low, high = (low, limit) if is_enough else (limit + 1, high)
        bounds = _filled(borders, loads, low)
        loads = [
            load + end - start for load, (start, end) in zip(loads, pairwise(bounds), strict=False)
        ]
        found.append(tuple(bounds))
    return tuple(found)


def _filled(borders: tuple[int, ...], loads: list[int], limit: int) -> list[int]:
    """Return the bounds of a buffer if each rank takes as much as it can below a limit.

    `loads` are the elements that ranks have of other buffers. If the limit is too low, the last
    bound is not the last of the `borders` at which the buffer may be divided.
    """
    bounds, index = [0], 0
    for load in loads:
        while index + 1 < len(borders) and load + borders[index + 1] - bounds[-1] <= limit:
            index += 1
        bounds.append(borders[index])
    return bounds


@lru_cache
def places_of_states(grid: Grid, factors: Factors) -> list[tuple[int, ...]]:
    """Return a tuple per rank that is equal for ranks with the same optimizer states."""
    places: list[tuple[int, ...]] = []
    for rank in range(grid.size):
        coordinates = grid.coordinates(rank)
        digits = factors.digits(coordinates.data)
        places.append((coordinates.tensor, coordinates.pipeline, *digits[:-1]))
    return places


def survives(grid: Grid, factors: Factors) -> Survives:
    """Return what a layout survives without a checkpoint.

    With o optimizer intervals and D replicas, D/o ranks hold the same states. They are o * tensor
    ranks apart. A layout survives a node if not all of them are on the same node.
    """
    copies = factors.data // factors.optimizer
    if copies == 1:
        return "nothing"
    distance = factors.optimizer * grid.tensor
    for stage in range(grid.pipeline):
        for offset in range(distance):
            first = stage * grid.data * grid.tensor + offset
            last = first + (copies - 1) * distance
            if grid.node(first) == grid.node(last):
                return "rank"
    return "node"
