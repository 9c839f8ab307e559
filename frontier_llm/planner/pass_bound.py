"""A lower bound on the seconds of a pipeline, without the lists of split backward passes.

Splitting backward passes keeps the order of passes. So each of these sums is a lower bound, for any
stage and any pass p of its first micro-batch:

- the seconds of the actions that compute the input of p, one after the other,
- the work of the stage from p on, in the order of passes,
- and, after the last pass of the stage, the input gradients of the chunks before it, except for the
  time that weight gradients that still wait may take.
"""

from collections.abc import Iterable, Sequence

from frontier_llm.geometry.pipeline_actions import Action, Placement
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.planner.timeline import NO_SEND, ActionSeconds, Send, shortened

ROUNDING = 1e-9
"""Share by which the bound is lowered, more than the rounding errors of all sums."""


def least_pass_seconds(
    layout: ResolvedLayout,
    seconds: Sequence[Sequence[ActionSeconds]],
    send: Send,
    stages: Iterable[int],
) -> float:
    """Return a lower bound on `timeline.pass_seconds` of a layout that splits backward passes.

    Args:
        layout: the layout.
        seconds: for each stage and each of its virtual stages, the seconds of an action.
        send: seconds of each send between stages.
        stages: the stages whose sums are computed. Each gives a lower bound.
    """
    short = shortened(layout)
    orders = short.pass_order.actions
    chains = _Chains(layout.placement, seconds, send)
    waiting = layout.waiting_weights or short.micro_batches * layout.virtual_stages
    least = busy = 0.0
    for stage in stages:
        work = chains.work(stage)
        late = waiting * max(actions.weight_gradients for actions in seconds[stage])
        tail = max(0.0, chains.seconds_after(stage, orders[stage][-1]) - late)
        first = _seconds_from_first(chains, stage, orders[stage], work, short.micro_batches)
        least = max(least, first + tail)
        busy = max(busy, sum(map(sum, work.values())))
    left_out = layout.micro_batches - short.micro_batches
    return (least + left_out * busy) * (1 - ROUNDING)


def _seconds_from_first(
    chains: "_Chains",
    stage: int,
    order: Sequence[Action],
    work: dict[str, list[float]],
    micro_batches: int,
) -> float:
    """Return the largest sum of the seconds before a pass and of the work of the stage from it on.

    Args:
        chains: the seconds before each pass of the first micro-batch.
        stage: the stage.
        order: its passes.
        work: seconds of its passes, by kind and virtual stage.
        micro_batches: number of micro-batches.
    """
    left = micro_batches * sum(map(sum, work.values()))
    found = 0
    largest = 0.0
    for kind, virtual_stage, micro_batch in order:
        if micro_batch == 0:
            before = chains.seconds_before(stage, virtual_stage, is_forward=kind == "forward")
            largest = max(largest, before + left)
            found += 1
            if found == 2 * len(work["forward"]):
                break
        left -= work[kind][virtual_stage]
    return largest


class _Chains:
    """The seconds of one micro-batch through all model chunks, if no stage ever waits."""

    def __init__(
        self, placement: Placement, seconds: Sequence[Sequence[ActionSeconds]], send: Send
    ) -> None:
        self._placement, self._seconds, self._send = placement, seconds, send
        self._forward_starts: list[float] = []
        self._backward_starts = [0.0] * placement.chunks
        now = 0.0
        for chunk in range(placement.chunks):
            self._forward_starts.append(now)
            now += self._of(chunk).forward + sum(self._sent(chunk, chunk + 1))
        for chunk in reversed(range(placement.chunks)):
            self._backward_starts[chunk] = now
            actions, sent = self._of(chunk), self._sent(chunk, chunk - 1)
            now += min(actions.input_gradients, actions.backward) + sum(sent)
        self._end = now

    def seconds_before(self, stage: int, virtual_stage: int, *, is_forward: bool) -> float:
        """Return the seconds until the input of a pass is computed."""
        starts = self._forward_starts if is_forward else self._backward_starts
        return starts[self._placement.chunk(stage, virtual_stage)]

    def seconds_after(self, stage: int, last: Action) -> float:
        """Return the seconds of the input gradients that follow the last pass of a stage."""
        chunk = self._placement.chunk(stage, last.virtual_stage)
        return self._end - self._backward_starts[chunk - 1] if chunk > 0 else 0.0

    def work(self, stage: int) -> dict[str, list[float]]:
        """Return lower bounds on the seconds of passes, by kind and virtual stage.

        Those of backward passes include the weight gradients. The two are one action only if no
        other stage waits for the input gradients (geometry/deferral.py).
        """
        forward, backward = [], []
        for virtual_stage, actions in enumerate(self._seconds[stage]):
            chunk = self._placement.chunk(stage, virtual_stage)
            forward.append(actions.forward + self._sent(chunk, chunk + 1).occupied)
            split = actions.input_gradients + actions.weight_gradients
            is_sent = self._is_sent(chunk, chunk - 1)
            occupied = self._sent(chunk, chunk - 1).occupied
            backward.append(split + occupied if is_sent else min(split, actions.backward))
        return {"forward": forward, "backward": backward}

    def _of(self, chunk: int) -> ActionSeconds:
        placement = self._placement
        return self._seconds[placement.stage(chunk)][placement.virtual_stage(chunk)]

    def _is_sent(self, chunk: int, reader: int) -> bool:
        placement = self._placement
        inside = 0 <= reader < placement.chunks
        return inside and placement.stage(reader) != placement.stage(chunk)

    def _sent(self, chunk: int, reader: int) -> Send:
        return self._send if self._is_sent(chunk, reader) else NO_SEND
