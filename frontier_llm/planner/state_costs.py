"""Seconds of the communication of model states on one stage, without overlap.

The flows and their bytes are those of geometry/state_traffic.py.
"""

from frontier_llm.geometry.formats import Format
from frontier_llm.geometry.partition import Digit
from frontier_llm.geometry.wire import all_reduce_bytes, gather_bytes
from frontier_llm.planner.candidate import Candidate, StageKind
from frontier_llm.planner.communication import Cost, GridGroups
from frontier_llm.planner.compute import Engine


class StateCosts:
    """Costs of the communication of one kind of stage.

    Attributes:
        elements: of all units, padding included.
        gather: parameters, before one forward pass.
        gather_again: parameters, before one backward pass.
        scatter: gradients, in one micro-batch.
        sums: gradients, once per step.
        refresh: parameters, once per step.
    """

    def __init__(
        self, candidate: Candidate, kind: StageKind, groups: GridGroups, engine: Engine
    ) -> None:
        factors = candidate.factors
        self._layout, self._groups, self._engine = candidate.layout, groups, engine
        self._formats = candidate.layout.formats
        n = sum(count * factors.padded(size) for size, count in kind.units)
        units = sum(count for _, count in kind.units)
        together = engine.message_elements
        self._messages = -(-n // together) if together else units
        of_params, of_grads = n / factors.params, n / factors.grads
        self.elements = n
        self.gather = self._gather("params", n, self._formats.params)
        self.gather_again = self._again(n)
        self.scatter = (
            _both(self._scatter("params", n), self._scatter("grads", of_params))
            if factors.grads > 1
            else self._nothing("params")
        )
        self.sums = _both(self._scatter("optimizer", of_grads), self._sum(n / factors.optimizer))
        self.refresh = _both(
            self._gather("optimizer", of_grads, self._formats.refresh),
            self._gather("grads", of_params, self._formats.refresh),
        )

    def _gather(self, digit: Digit, elements: float, code: Format) -> Cost:
        compute = self._layout.compute_bytes
        width = compute if code.is_lossless(compute) else code.element_bytes
        return self._ring(digit, elements * width)

    def _scatter(self, digit: Digit, elements: float) -> Cost:
        """Return the cost of a reduce-scatter, in the format for one or for several nodes."""
        width, low = self._width(digit)
        inside = self._groups.is_inside_node(width, low)
        code = self._formats.grads if inside else self._formats.grads_across
        return self._ring(digit, elements * code.element_bytes)

    def _again(self, elements: float) -> Cost:
        """Return the cost of the backward pass's gather, from a second copy if there is one."""
        copies = self._engine.second_copy_ranks
        if copies is None or copies >= self._layout.factors.params:
            return self._gather("params", elements, self._formats.params_backward)
        sent = gather_bytes(elements * self._layout.compute_bytes, copies)
        return self._groups.data(copies, 1).gather(sent, self._messages)

    def _ring(self, digit: Digit, total_bytes: float) -> Cost:
        """Return the cost of an all-gather or reduce-scatter of `total_bytes` along a digit."""
        width, low = self._width(digit)
        if width == 1:
            return self._nothing(digit)
        sent = gather_bytes(total_bytes, width)
        return self._groups.data(width, low).gather(sent, self._messages)

    def _sum(self, elements: float) -> Cost:
        width, low = self._width("replica")
        if width == 1:
            return self._nothing("replica")
        sent = all_reduce_bytes(elements * self._engine.sums_bytes, width)
        return self._groups.data(width, low).all_reduce(sent, self._messages)

    def _nothing(self, digit: Digit) -> Cost:
        width, low = self._width(digit)
        return Cost(0.0, self._groups.data(width, low).link)

    def _width(self, digit: Digit) -> tuple[int, int]:
        """Return the ranks of a group along a digit, and their distance in data ranks."""
        factors = self._layout.factors
        return factors.width(digit), factors.stride(digit)


def _both(one: Cost, other: Cost) -> Cost:
    """Return the sum of two costs, with the link of the longer one."""
    return Cost(one.seconds + other.seconds, max(one, other).link)
