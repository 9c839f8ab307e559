"""Seconds of the traffic of model states on one stage, if it ran alone.

Which flows there are, and the bytes of each, is geometry/state_traffic.py's; here they get a link.
"""

from frontier_llm.geometry.formats import Format
from frontier_llm.geometry.partition import Digit
from frontier_llm.geometry.wire import all_reduce_bytes, gather_bytes
from frontier_llm.planner.candidate import Candidate, StageKind
from frontier_llm.planner.communication import Cost, Lines
from frontier_llm.planner.engine import Engine


class StateCosts:
    """The flows of one kind of stage.

    Attributes:
        elements: of all units, padding included.
        gather: parameters, before one forward pass.
        gather_again: parameters, before one backward pass.
        scatter: gradients, in one micro-batch.
        sums: gradients, once a step.
        refresh: parameters, once a step.
    """

    def __init__(self, candidate: Candidate, kind: StageKind, lines: Lines, engine: Engine) -> None:
        factors = candidate.factors
        self._candidate, self._lines, self._engine = candidate, lines, engine
        self._formats = candidate.model.formats
        n = sum(count * factors.padded(size) for size, count in kind.units)
        units = sum(count for _, count in kind.units)
        together = engine.message_elements
        self._messages = -(-n // together) if together else units
        of_params, of_grads = n / factors.params, n / factors.grads
        self.elements = n
        self.gather = self._gather("a", n, self._formats.params)
        self.gather_again = self._again(n)
        self.scatter = (
            _both(self._scatter("a", n), self._scatter("b", of_params))
            if factors.grads > 1
            else self._nothing("a")
        )
        self.sums = _both(self._scatter("c", of_grads), self._sum(n / factors.optimizer))
        self.refresh = _both(
            self._gather("c", of_grads, self._formats.refresh),
            self._gather("b", of_params, self._formats.refresh),
        )

    def _gather(self, digit: Digit, elements: float, code: Format) -> Cost:
        compute = self._candidate.compute_bytes
        width = compute if code.is_lossless(compute) else code.element_bytes
        return self._ring(digit, elements * width)

    def _scatter(self, digit: Digit, elements: float) -> Cost:
        """Return the time of a reduce-scatter, in the format of the nodes that it crosses."""
        width, low = self._width(digit)
        inside = self._lines.is_inside_node(width, low)
        code = self._formats.grads if inside else self._formats.grads_across
        return self._ring(digit, elements * code.element_bytes)

    def _again(self, elements: float) -> Cost:
        """Return the time of the backward pass's gather, from a second copy if there is one."""
        copies = self._engine.second_copy_ranks
        if copies is None or copies >= self._candidate.factors.params:
            return self._gather("a", elements, self._formats.params_backward)
        sent = gather_bytes(elements * self._candidate.compute_bytes, copies)
        return self._lines.data(copies, 1).gather(sent, self._messages)

    def _ring(self, digit: Digit, total_bytes: float) -> Cost:
        """Return the time of an all-gather or reduce-scatter of so many bytes along a digit."""
        width, low = self._width(digit)
        if width == 1:
            return self._nothing(digit)
        sent = gather_bytes(total_bytes, width)
        return self._lines.data(width, low).gather(sent, self._messages)

    def _sum(self, elements: float) -> Cost:
        width, low = self._width("d")
        if width == 1:
            return self._nothing("d")
        sent = all_reduce_bytes(elements * self._engine.sums_bytes, width)
        return self._lines.data(width, low).all_reduce(sent, self._messages)

    def _nothing(self, digit: Digit) -> Cost:
        width, low = self._width(digit)
        return Cost(0.0, self._lines.data(width, low).link)

    def _width(self, digit: Digit) -> tuple[int, int]:
        """Return the ranks of a group along a digit, and the data ranks from one to the next."""
        factors = self._candidate.factors
        low = {"a": 1, "b": factors.params, "c": factors.grads, "d": factors.optimizer}[digit]
        return factors.width(digit), low


def _both(one: Cost, other: Cost) -> Cost:
    """Add two costs; the link is that of the longer one."""
    return Cost(one.seconds + other.seconds, max(one, other).link)
