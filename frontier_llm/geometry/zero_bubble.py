"""Zero-bubble schedules: input gradients early, weight gradients where a stage would wait.

`zb_h1` and `zb_v` are those of Qi et al. (arXiv:2401.10241, sections 2 and 6), `v_half` is that of
Qi et al. (arXiv:2405.15362). `zb_v` and `v_half` have two model chunks per stage in V placement.
They are made for passes of equal seconds, and no stage waits for long if seconds are similar.
"""

from collections import deque

from frontier_llm.geometry.pipeline_actions import Action, ActionLists, Kind, actions_of


def zb_h1(stages: int, micro_batches: int) -> ActionLists:
    """Return the actions of ZB-H1: 1F1B, whose weight gradients are computed later.

    Stage s lets the weight gradients of s micro-batches wait. With its at most `stages - s`
    micro-batches between forward and backward pass, each stage holds as much as stage 0 in 1F1B.
    """
    (forward,) = actions_of("forward", 1, micro_batches)
    (inputs,) = actions_of("input_gradients", 1, micro_batches)
    (weights,) = actions_of("weight_gradients", 1, micro_batches)
    lists = []
    for stage in range(stages):
        warm_up = min(stages - stage - 1, micro_batches)
        actions = forward[:warm_up]
        for micro_batch in range(micro_batches):
            actions += forward[warm_up + micro_batch : warm_up + micro_batch + 1]
            actions.append(inputs[micro_batch])
            if micro_batch >= stage:
                actions.append(weights[micro_batch - stage])
        lists.append(actions + weights[max(0, micro_batches - stage) :])
    return lists


def zb_v(stages: int, micro_batches: int) -> ActionLists:
    """Return the actions of ZB-V, which holds no more activations than 1F1B on its first stage."""
    # The schedule is defined for at least 2 * stages - 1 micro-batches. Leaving out micro-batches
    # keeps the order of the others valid.
    count = max(2 * stages - 1, micro_batches)
    lists = []
    for stage in range(stages):
        order = _zb_v_order(stage, stages, count)
        lists.append([action for action in order if action.micro_batch < micro_batches])
    return lists


def _zb_v_order(stage: int, stages: int, micro_batches: int) -> list[Action]:
    kinds: dict[str, Kind]
    kinds = {"F": "forward", "B": "input_gradients", "W": "weight_gradients"}
    lists = {
        f"{name}{virtual_stage}": deque(actions)
        for name, kind in kinds.items()
        for virtual_stage, actions in enumerate(actions_of(kind, 2, micro_batches))
    }
    order: list[Action] = []

    def put(names: str, times: int = 1) -> None:
        for name in names.split() * times:
            if lists[name]:
                order.append(lists[name].popleft())

    rest = stages - stage
    put("F0", 2 * rest - 1)
    put("F1 F0", stage)
    put("F1 B1 W1", rest)
    while lists["F1"]:
        put("F0 B0 W0 F1 B1 W1")
    put("B0 B1", stage)
    put("B0 W0", rest)
    put("W1", len(lists["W1"]))
    put("W0", len(lists["W0"]))
    return order


def v_half(stages: int, micro_batches: int) -> ActionLists:
    """Return the actions of V-Half, which holds about half the activations of 1F1B.

    Forward passes and input gradients of a micro-batch have fixed slots, six slots after those of
    the micro-batch before. Weight gradients take the slots that are left.
    """
    # With other numbers of stages, two actions of a stage would have the same slot modulo 6.
    shift = 3 if stages % 2 == 0 else 0
    (forward_0, forward_1) = actions_of("forward", 2, micro_batches)
    (inputs_0, inputs_1) = actions_of("input_gradients", 2, micro_batches)
    weights = actions_of("weight_gradients", 2, micro_batches)
    lists = []
    for stage in range(stages):
        slots: dict[int, Action] = {}
        for first_slot, actions in (
            (2 * stage, forward_0),
            (3 * stages - stage - 2, forward_1),
            (3 * stages + shift + 2 * stage - 1, inputs_1),
            (6 * stages + shift - stage - 2, inputs_0),
        ):
            slots.update((first_slot + 6 * i, action) for i, action in enumerate(actions))
        order: list[Action] = []
        waiting: deque[Action] = deque()
        for slot in range(max(slots) + 1):
            if slot in slots:
                action = slots[slot]
                order.append(action)
                if action.kind == "input_gradients":
                    waiting.append(weights[action.virtual_stage][action.micro_batch])
            elif waiting:
                order.append(waiting.popleft())
        lists.append([*order, *waiting])
    return lists
