"""Text sampled from a model is the same in whatever layout it lies."""

import io
import logging
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from frontier_llm.launch.world import World
from frontier_llm.trainer.sample import Sampler
from tests.covering import covering
from tests.ranks import run_ranks
from tests.trainer.rig import make_rig
from tests.values import TINY_T5, tiny_values

PROMPTS = ["abc", "", "a prompt that is longer than the window of sixteen tokens"]
LAYOUTS = {
    "tensor2_sequence": (2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "pipeline2_chunks2": (2, ["parallel.pipeline=2", "parallel.chunks=2"]),
    "context2_pipeline2": (4, ["parallel.context=2", "parallel.pipeline=2"]),
}
MODELS = {"gpt": [], "rotary": ["model.positions=rotary"], "t5": list(TINY_T5)}


class Letters:
    """A tokenizer of single letters, with two tokens beside them and sentinels after them."""

    vocabulary = 21
    eod = 1

    def sentinels(self, count: int) -> list[int]:
        return [120 - k for k in range(count)]

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 19 + 2 for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


def sample(
    world: World, values: dict[str, Any], temperature: float, prompts: Sequence[str] = PROMPTS
) -> list[str]:
    rig = make_rig(world, values)
    rig.train(1)
    sampler = Sampler(rig.model, rig.groups, rig.config, Letters())  # type: ignore[arg-type]
    return sampler.continue_texts(prompts, 4 if prompts is PROMPTS else 12, temperature, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("model", covering(MODELS, ["rotary"]))
def test_every_layout_says_the_same(model: str) -> None:
    alone = run_ranks(sample, 1, tiny_values(*MODELS[model]), 0.5)[0]
    assert [len(re.findall(r"\d+", text)) for text in alone] == [4] * len(PROMPTS)
    for name, (size, overrides) in LAYOUTS.items():
        if model == "t5" and "context" in name:
            continue  # refused
        for texts in run_ranks(sample, size, tiny_values(*MODELS[model], *overrides), 0.5):
            assert texts == alone


CUT = {"gpt": (16, []), "t5": (14, list(TINY_T5))}
"""How many tokens of a prompt a model reads, and its overrides."""


def warnings_of(world: World, values: dict[str, Any], prompts: Sequence[str]) -> list[str]:
    """Return what a rank logs when it continues prompts."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger(Sampler.__module__).addHandler(handler)
    sample(world, values, 0.0, prompts)
    return said.getvalue().splitlines()


@pytest.mark.parametrize("model", CUT)
def test_a_prompt_that_is_cut_is_named_once(model: str) -> None:
    room, overrides = CUT[model]
    values = tiny_values(*overrides, "data.sequence_length=16", "parallel.pipeline=2")
    logs = run_ranks(warnings_of, 2, values, ["a" * room, "b" * (room + 1)])
    assert logs[1] == []
    wants = f"(data.sequence_length=16): the model reads only the last {room} of its {room + 1} tok"
    (line,) = logs[0]
    assert line.startswith(f"the prompt '{'b' * (room + 1)}' is longer than a sample {wants}")


R, S = "{mode: R}", "{rate: 0.5, span: null, mode: S}"
# prompt, denoisers, and what is read and said around it: 127 and 126 are modes, 120 - k sentinels
FILLED = {
    "fills the hole after a prompt": ("abc", "", [4, 5, 6, 120], [0, 120]),
    "in the mode of holes": ("abc", R, [127, 4, 5, 6, 120], [0, 120]),
    "continues the prompt": ("abc", f"{R}, {S}", [126, 4, 5, 6], [0]),
    "fills the holes of a prompt": ("a<extra_id_0>b<extra_id_7>", "", [4, 120, 5, 113], [0]),
    "fills them in their mode": ("<extra_id_1>c", f"{S}, {R}, {{mode: X}}", [126, 119, 6], [0]),
}


@pytest.mark.parametrize(
    "case", covering(FILLED, ["in the mode of holes", "fills the holes of a prompt"])
)
def test_an_encoder_decoder_fills_holes_or_continues_the_prompt(case: str) -> None:
    """Word by word the likeliest, by the model itself fed with the prompt and what was said."""
    prompt, denoisers, read, start = FILLED[case]

    def expected(world: World, values: dict[str, Any]) -> str:
        rig = make_rig(world, values)
        rig.train(1)
        chunk, said = rig.model.chunks[0].eval(), list(start)
        with torch.no_grad():
            for _ in range(12):
                logits = chunk(
                    encoder_tokens=torch.tensor([[*read, Letters.eod]]),
                    tokens=torch.tensor([said]),
                )
                said = [*said, int(logits[0, -1, :121].argmax())]
        names = {120 - k: f"<extra_id_{k}>" for k in range(100)}
        text = " ".join(names.get(token, str(token)) for token in said[len(start) :])
        return text.replace(" <", "<").replace("> ", ">")

    values = tiny_values(*TINY_T5, *([f"data.denoisers=[{denoisers}]"] if denoisers else []))
    wanted = run_ranks(expected, 1, values)[0]
    assert run_ranks(sample, 1, values, 0.0, [prompt])[0] == [wanted]
    assert case not in ("continues the prompt", "in the mode of holes") or "<extra_id_" in wanted
