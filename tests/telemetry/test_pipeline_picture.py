"""The picture of a step has a box for each action, a legend and a row for each drawn stage."""

from frontier_llm.geometry.pipeline_schedule import Action, Event
from frontier_llm.telemetry.pipeline_picture import DRAWN_STAGES, draw


def test_every_kind_of_action_has_its_colour_in_the_legend():
    kinds = ("forward", "input_gradients", "weight_gradients")
    events = [Event(0, Action(kind, 0, 3), i, i + 1.0) for i, kind in enumerate(kinds)]
    text = draw(events)
    colours = [word.split('"')[1] for word in text.split("fill=")[1:] if "#" in word[:9]]
    boxes = text.count("<title>")
    assert boxes == 3
    for kind in kinds:
        assert f">{kind.replace('_', ' ')}<" in text
        assert f"{kind.replace('_', ' ')}: micro-batch 3, virtual stage 0" in text
    assert ">backward<" not in text
    # once in the legend and once in the box
    assert sum(colours.count(colour) == 2 for colour in ("#2563eb", "#93c5fd", "#86efac")) == 3


def test_boxes_end_with_the_step_and_many_stages_are_thinned_out():
    events = [Event(s, Action("forward", 0, 0), s, s + 1.0) for s in range(4 * DRAWN_STAGES)]
    text = draw(events)
    assert text.count(">stage ") == text.count("<title>") == DRAWN_STAGES
    assert ">stage 4<" in text
    assert ">stage 1<" not in text
