"""Sample text from the newest checkpoint of a run.

    python tools/generate.py runs/gpt_tiny-20260131-120000 "def main("
    python tools/generate.py RUN --tokens 200 --temperature 0.6 "import os" "class Node:"

Runs in one process on whatever is here, however the model was cut when it was trained.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import yaml
from rich.console import Console
from rich.text import Text

from frontier_llm.config import RunConfig, decode
from frontier_llm.errors import DataError, FrontierError


def main() -> int:
    """Parse the command line, sample, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("prompts", nargs="*", default=["import "], help="texts to continue")
    parser.add_argument("--tokens", type=int, default=100, help="to add to each (default 100)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 = always the likeliest (default 0.8)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the draws (default 1)")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        config = on_one_rank(arguments.run)
        texts = generate(config, arguments)
    except FrontierError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    console = Console(highlight=False)
    for prompt, text in zip(arguments.prompts, texts, strict=True):
        console.print(Text.assemble((prompt, "bold"), text))
        console.rule(style="dim")
    return 0


def on_one_rank(run: Path) -> RunConfig:
    """Read a run's configuration, with the whole model on one rank."""
    try:
        values = yaml.safe_load((run / "config.yaml").read_text())
    except OSError:
        raise DataError(f"{run} is no run directory: it holds no config.yaml") from None
    values["parallel"] = {
        "tensor": 1, "pipeline": 1, "chunks": 1, "sequence": False, "layers_per_stage": None,
    }  # fmt: skip
    values["run"] = values["run"] | {"dir": str(run)}
    return decode(values)


def generate(config: RunConfig, arguments: argparse.Namespace) -> list[str]:
    """Build the model on one rank, load the weights of the run and sample."""
    import torch.distributed as dist

    from frontier_llm.checkpoint.restore import load_weights
    from frontier_llm.checkpoint.scan import find
    from frontier_llm.data.corpora import open_data
    from frontier_llm.device.accelerator import Accelerator
    from frontier_llm.device.kernels import resolve
    from frontier_llm.model.build import build_model
    from frontier_llm.parallel import megatron_cpu
    from frontier_llm.parallel.groups import destroy_groups, make_groups
    from frontier_llm.trainer.sample import Sampler

    accelerator = Accelerator.of_rank(0)
    if accelerator.is_cpu:
        megatron_cpu.install()
    with tempfile.TemporaryDirectory() as folder:
        backend = "gloo" if accelerator.is_cpu else "nccl"
        dist.init_process_group(backend, f"file://{folder}/store", rank=0, world_size=1)
        groups = make_groups(config.parallel, 1, arguments.seed)
        kernels = resolve(config.kernels, accelerator.device)
        model = build_model(config, groups, "fp32", accelerator.device, kernels)
        load_weights(find(Path(config.run.dir)), model.records)
        tokenizer = open_data(config.data).tokenizer
        sampler = Sampler(model, groups, config, tokenizer)
        texts = sampler.continue_texts(
            arguments.prompts, arguments.tokens, arguments.temperature, arguments.seed
        )
        destroy_groups()
    return texts


if __name__ == "__main__":
    sys.exit(main())
