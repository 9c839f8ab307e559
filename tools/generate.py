"""Sample text from the newest checkpoint of a run.

    python tools/generate.py runs/gpt_tiny-20260131-120000 "def main("
    python tools/generate.py RUN --tokens 200 --temperature 0.6 "import os" "class Node:"

Runs in one process on whatever is here, however the model was cut when it was trained.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.text import Text

from frontier_llm.config import RunConfig
from tools.console import wide_console
from tools.one_rank import on_one_rank, whole_model
from tools.options import at_least, ending


def main(arguments: Sequence[str] | None = None) -> int:
    """Sample and print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("prompts", nargs="*", default=["import "], help="texts to continue")
    parser.add_argument("--tokens", type=at_least(1), default=100, help="for each (default 100)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 = always the likeliest (default 0.8)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the draws (default 1)")
    options = parser.parse_intermixed_args(arguments)
    texts = generate(on_one_rank(options.run), options)
    console = wide_console(highlight=False)
    for prompt, text in zip(options.prompts, texts, strict=True):
        console.print(Text.assemble((prompt, "bold"), text))
        console.rule(style="dim")
    return 0


def generate(config: RunConfig, options: argparse.Namespace) -> list[str]:
    """Build the model on one rank, load the weights of the run and sample."""
    from frontier_llm.data.corpora import open_data
    from frontier_llm.device.accelerator import Accelerator
    from frontier_llm.trainer.sample import Sampler

    tokenizer = open_data(config.data).tokenizer
    device = Accelerator.of_rank(0).device
    with whole_model(config, Path(config.run.dir), device) as (model, groups):
        sampler = Sampler(model, groups, config, tokenizer)
        return sampler.continue_texts(
            options.prompts, options.tokens, options.temperature, options.seed
        )


if __name__ == "__main__":
    sys.exit(ending(main))
