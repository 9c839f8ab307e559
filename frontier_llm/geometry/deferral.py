"""Change when the stages of a pipeline compute the gradients of weights.

`defer` splits backward passes and computes weight gradients where the stage would wait.
`limit_waiting` computes them earlier than a list says, so that fewer wait. `join` makes one
backward pass of two actions where nothing is gained by two.
"""

from collections import deque
from collections.abc import Sequence

from frontier_llm.geometry.pipeline_actions import Action, ActionLists, Placement, actions_of


def defer(
    placement: Placement, lists: Sequence[Sequence[Action]], limit: int, input_cost: int
) -> ActionLists:
    """Split backward passes, and compute weight gradients where a stage would wait.

    Where it would wait follows from nominal costs: forward passes and weight gradients cost 1. A
    gap is a whole number then, so weight gradients delay another action only because of `limit`.

    Args:
        placement: placement of the model chunks.
        lists: for each stage, its forward and backward actions in order.
        limit: how many weight gradients of a stage may wait, at least 1.
        input_cost: nominal cost of input gradients; 2 if the forward pass is recomputed.
    """
    ends: dict[tuple[bool, int, int], int] = {}  # by whether it is forward, chunk, micro-batch
    micro_batches = 1 + max(action.micro_batch for action in lists[0])
    inputs = actions_of("input_gradients", placement.virtual_stages, micro_batches)
    weights = actions_of("weight_gradients", placement.virtual_stages, micro_batches)
    orders: ActionLists = [[] for _ in lists]
    waiting: list[deque[Action]] = [deque() for _ in lists]
    free_at, next_action = [0] * len(lists), [0] * len(lists)
    has_progressed = True
    while has_progressed:
        has_progressed = False
        for stage, actions in enumerate(lists):
            queue, order, now = waiting[stage], orders[stage], free_at[stage]
            for index in range(next_action[stage], len(actions)):
                kind, virtual_stage, micro_batch = actions[index]
                chunk, is_forward = placement.chunk(stage, virtual_stage), kind == "forward"
                source = placement.source(chunk, is_forward=is_forward)
                ready = 0 if source is None else ends.get((*source, micro_batch))
                if ready is None:
                    break
                while queue and (now < ready or not (is_forward or len(queue) < limit)):
                    order.append(queue.popleft())
                    now += 1
                now = max(now, ready) + (1 if is_forward else input_cost)
                ends[is_forward, chunk, micro_batch] = now
                if is_forward:
                    order.append(actions[index])
                else:
                    order.append(inputs[virtual_stage][micro_batch])
                    queue.append(weights[virtual_stage][micro_batch])
                next_action[stage] = index + 1
                has_progressed = True
            free_at[stage] = now
    return [[*order, *queue] for order, queue in zip(orders, waiting, strict=True)]


def limit_waiting(lists: Sequence[Sequence[Action]], limit: int) -> ActionLists:
    """Compute weight gradients earlier where more than `limit` of a stage would wait."""
    results: ActionLists = []
    for actions in lists:
        order: list[Action] = []
        waiting: dict[Action, None] = {}  # an ordered set
        for action in actions:
            if action.kind == "input_gradients":
                if len(waiting) == limit:
                    oldest = next(iter(waiting))
                    del waiting[oldest]
                    order.append(oldest)
                waiting[action._replace(kind="weight_gradients")] = None
            elif action.kind == "weight_gradients":
                if action not in waiting:
                    continue
                del waiting[action]
            order.append(action)
        results.append(order)
    return results


def join(placement: Placement, lists: Sequence[Sequence[Action]]) -> ActionLists:
    """Make one backward pass of input gradients that are followed by their weight gradients.

    One backward pass is faster than two actions. But it sends its input gradients later, so this is
    done only where no other stage waits for them.
    """
    results: ActionLists = []
    for stage, actions in enumerate(lists):
        order: list[Action] = []
        for action in actions:
            previous = order[-1] if order else None
            chunk = placement.chunk(stage, action.virtual_stage)
            is_pair = (
                action.kind == "weight_gradients"
                and previous == action._replace(kind="input_gradients")
                and (chunk == 0 or placement.stage(chunk - 1) == stage)
            )
            if is_pair:
                order[-1] = action._replace(kind="backward")
            else:
                order.append(action)
        results.append(order)
    return results
