"""Text sampled from a model is the same in whatever layout it lies."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from frontier_llm.launch.world import World
from frontier_llm.trainer.sample import Sampler
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
    """A tokenizer of single letters, with two tokens beside them."""

    vocabulary = 100
    eod = 1

    def sentinels(self, count: int) -> list[int]:
        return [120 - k for k in range(count)]

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 90 + 2 for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


def sample(world: World, values: dict[str, Any], temperature: float) -> list[str]:
    rig = make_rig(world, values)
    rig.train(1)
    sampler = Sampler(rig.model, rig.groups, rig.config, Letters())  # type: ignore[arg-type]
    return sampler.continue_texts(PROMPTS, 4, temperature, seed=3)


@pytest.mark.parametrize("model", MODELS)
def test_every_layout_says_the_same(model: str) -> None:
    alone = run_ranks(sample, 1, tiny_values(*MODELS[model]), 0.5)[0]
    assert [len(text.split()) for text in alone] == [4] * len(PROMPTS)
    for name, (size, overrides) in LAYOUTS.items():
        if model == "t5" and "context" in name:
            continue  # refused
        for texts in run_ranks(sample, size, tiny_values(*MODELS[model], *overrides), 0.5):
            assert texts == alone


@pytest.mark.parametrize("fills", [True, False])
def test_an_encoder_decoder_fills_the_hole_or_continues_the_prompt(fills: bool) -> None:
    """Word by word the likeliest, by the model itself fed with the prompt and what was said."""

    def expected(world: World, values: dict[str, Any]) -> list[str]:
        rig = make_rig(world, values)
        rig.train(1)
        chunk, letters = rig.model.chunks[0].eval(), Letters()
        (sentinel,) = letters.sentinels(1)
        prompt, last_row = letters.encode(PROMPTS[0]), rig.config.model.vocabulary - 1
        read = [*prompt, sentinel] if fills else [last_row - 1, *prompt]
        said = start = [0, sentinel] if fills else [0]
        with torch.no_grad():
            for _ in range(4):
                logits = chunk(
                    encoder_tokens=torch.tensor([[*read, letters.eod]]),
                    tokens=torch.tensor([said]),
                )
                said = [*said, int(logits[0, -1, : letters.vocabulary].argmax())]
        return [letters.decode(said[len(start) :])]

    prefix = "data.denoisers=[{mode: R}, {rate: 0.5, span: null, mode: S}]"
    values = tiny_values(*TINY_T5, *([] if fills else [prefix]))
    assert run_ranks(sample, 1, values, 0.0)[0][:1] == run_ranks(expected, 1, values)[0]
