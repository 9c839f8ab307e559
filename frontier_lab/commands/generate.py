"""Continue prompts with the model of a run, from its newest or another checkpoint.

    frontier-llm generate runs/gpt_tiny-20260131-120000 "def main("
    frontier-llm generate RUN_DIR --tokens 200 --temperature 0.6 "import os" "class Node:"

If the documents of the run were joined (`data.documents=joined`), the model reads an
end-of-document token before each prompt, as in training and `evaluate --text`; if they were
separate, it reads nothing before it. Which of the two is printed to standard error.

A T5 fills the gaps of a prompt, which are written `<extra_id_0>`, `<extra_id_1>` and so on. It
writes each of these sentinels before the text of the gap. Without them the gap is at the end.

If the denoisers of the run have modes, as in UL2, write no name of a mode into a prompt: its token
is put before the prompt. It is the mode of the first denoiser with `span: null` (in data=text_ul2:
S2S), or, if the prompt has gaps, of the first other one (NLU). No other mode can be chosen.

Runs in one process, on a GPU if there is one. The parallel layout of the run does not matter.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from frontier_lab.option_values import not_negative, saved_in_run, trained_run
from frontier_lab.single_process_model import (
    no_model,
    single_process_model,
    single_process_run,
)
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import at_least, tool_parser
from frontier_llm.config import RunConfig
from frontier_llm.config.data import DataConfig
from frontier_llm.errors import TrainingError

if TYPE_CHECKING:
    from frontier_llm.data.tokenizer import Tokenizer


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each prompt with its continuation; return the exit code."""
    parser = tool_parser(__doc__)
    parser.add_argument("run", type=trained_run, metavar="RUN_DIR", help="the run directory")
    parser.add_argument(
        "prompts", nargs="*", help="texts to continue (default: trainer.sample_prompts of the run)"
    )
    parser.add_argument("--checkpoint", type=saved_in_run, help="a checkpoint (default: newest)")
    parser.add_argument(
        "--tokens", type=at_least(1), default=100, help="tokens per prompt (default 100)"
    )
    parser.add_argument(
        "--temperature",
        type=not_negative,
        default=0.8,
        help="0 always takes the most probable token (default 0.8)",
    )
    parser.add_argument(
        "--seed", type=at_least(0), default=1, help="seed of the random choice (default 1)"
    )
    options = parser.parse_intermixed_args(arguments)
    texts = generate(*single_process_run(options.run, options.checkpoint), options)
    console = wide_console(highlight=False)
    for prompt, text in zip(options.prompts, texts, strict=True):
        console.print(Text.assemble((prompt, "bold"), text))
        console.rule(style="dim")
    return 0


def generate(config: RunConfig, weights: Path, options: argparse.Namespace) -> list[str]:
    """Load the run's model in this process; return the continuation of each prompt."""
    from frontier_lab.trained_tokenizer import open_trained_tokenizer, prepare_again
    from frontier_llm.data.corpora import open_all
    from frontier_llm.device.accelerator import Accelerator
    from frontier_llm.trainer.sample import Sampler, prompts_of

    data = config.data
    if not options.prompts:
        otherwise = ', or write prompts: RUN_DIR "PROMPT" ...'
        corpora = open_all(data, prepare_again(config, otherwise))
        corpora.check_validation()  # the prompts are its first words
        options.prompts = list(prompts_of(config, corpora))
    tokenizer = open_trained_tokenizer(config, weights)
    before = words_before(data, tokenizer)
    wide_console(stderr=True, highlight=False).print(f"before each prompt: {before}", markup=False)
    device = Accelerator.of_rank(0).device
    with single_process_model(config, weights, device) as (model, groups):
        sampler = Sampler(model, groups, config, tokenizer)
        try:
            return sampler.continue_texts(
                options.prompts, options.tokens, options.temperature, options.seed
            )
        except TrainingError as error:
            raise no_model(weights, str(error)) from None


def words_before(data: DataConfig, tokenizer: "Tokenizer") -> str:
    """Return in words what the model of a run reads before a prompt."""
    from frontier_llm.data.tokenizer_source import tokens_before_text

    if data.modes:
        first, gaps = (data.mode_of_prompt(has_gaps=has_gaps) for has_gaps in (False, True))
        return f"mode {first}; before one with gaps (<extra_id_0>): mode {gaps}"
    before = [tokenizer.token_of(token) for token in tokens_before_text(data, tokenizer)]
    return f"{before[0]} (the end of a document)" if before else "nothing"
