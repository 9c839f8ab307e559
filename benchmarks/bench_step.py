"""Compare a training step of frontier_llm with the same model in plain torch, in one process.

    python -m benchmarks.bench_step                      # on the device of this machine
    python -m benchmarks.bench_step --compiled           # also with torch.compile, both models
    python -m benchmarks.bench_step --quick              # smoke test
    python -m benchmarks.bench_step --json benchmarks/results/step_<cpu>_<date>.json

Both models run in one process and take turns. The plain model uses nn.Module,
scaled_dot_product_attention and fused AdamW. In bf16 it uses autocast over fp32 parameters, so that
both programs keep fp32 master weights. The table has the median time of a step of both models, and
the ratio of our time to the time of plain torch: below 1, frontier_llm is faster. With --compiled
two more models take part: ours with kernels=compiled, and the plain model with its layers compiled
by torch.compile.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))

import torch
from torch import nn

from benchmarks.harness import (
    add_numbers,
    bench_parser,
    compare,
    parse_bench,
    print_table,
    write_json,
)
from benchmarks.peers.plain_gpt import PlainGpt
from benchmarks.testbed.bare_steps import LEARNING_RATE, prepare_cpu, random_batches
from frontier_lab.single_process_model import groups_of_one_rank
from frontier_llm.cli.compose import compose
from frontier_llm.cli.options import run_command
from frontier_llm.config import RunConfig, decode
from frontier_llm.data.batch import Batch
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.parallel.groups import Groups
from frontier_llm.trainer.states import bare_step

QUICK = {"layers": 1, "sequence": 64, "steps": 1}
NUMBERS = (
    ("layers", 1, 4, "layers of the model"),
    ("hidden", 1, 768, "width of the model"),
    ("heads", 1, 12, "attention heads"),
    ("sequence", 1, 512, "tokens per sample"),
    ("steps", 1, 7, "timed steps per model"),
)
Step = Callable[[list[Batch]], None]


def plain_step(config: RunConfig, precision: str, device: torch.device, compiles: bool) -> Step:
    """Return a function that runs one step of the plain model, with compiled layers or without."""
    shape = config.model
    model = PlainGpt(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        vocabulary=shape.vocabulary,
        sequence=config.data.sequence_length,
    ).to(device)
    if compiles:
        for layer in model.layers:
            layer.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)

    def step(batches: list[Batch]) -> None:
        for batch in batches:
            autocast = (
                nullcontext()
                if precision == "fp32"
                else torch.autocast(device.type, dtype=torch.bfloat16)
            )
            with autocast:
                loss = model(batch.tokens, batch.labels)
            (loss / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def our_step(config: RunConfig, layout: ResolvedLayout, groups: Groups, kernels: str) -> Step:
    """Return a function that runs one step of frontier_llm; `kernels` is the key of this name."""
    device = Accelerator.of_rank(0).device
    _, step = bare_step(config.model_copy(update={"kernels": kernels}), layout, groups, device)

    def run(batches: list[Batch]) -> None:
        step.run(1, batches, LEARNING_RATE)

    return run


def measure(
    config: RunConfig, precision: Any, accelerator: Accelerator, groups: Groups, options: Any
) -> dict[str, Any]:
    """Time the models in turns; the first turn of each is a warm-up and is not counted."""
    layout = ResolvedLayout.resolve(config, 1, 1, precision=precision)
    steps = {
        "ours": our_step(config, layout, groups, "auto"),
        "plain": plain_step(config, precision, accelerator.device, False),
    }
    if options.compiled:
        steps |= {
            "ours_compiled": our_step(config, layout, groups, "compiled"),
            "plain_compiled": plain_step(config, precision, accelerator.device, True),
        }
    batches = [batch.to(accelerator.device) for batch in random_batches(layout)]

    def timed(step: Step) -> float:
        accelerator.synchronize()
        start = time.perf_counter()
        step(batches)
        accelerator.synchronize()
        return time.perf_counter() - start

    turns = {name: partial(timed, step) for name, step in steps.items()}
    contenders = compare(turns, options.steps + 1).values()
    seconds = {one.name: one.rounds[1:] for one in contenders}
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "precision": precision,
        "seconds": medians,
        "ratios": {
            f"{ours}/{plain}": medians[ours] / medians[plain]
            for ours in medians
            for plain in medians
            if ours.startswith("ours") and plain.startswith("plain")
        },
        "all_seconds": seconds,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each precision, print the table, write the JSON; return the exit code."""
    parser = bench_parser(__doc__, quick="one short layer, one step")
    add_numbers(parser, NUMBERS)
    add = parser.add_argument
    add("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"],
        help="precision of the computation (default both)")  # fmt: skip
    add("--compiled", action="store_true", help="also measure both models with compiled layers")
    options = parse_bench(parser, arguments, QUICK)
    accelerator = Accelerator.of_rank(0)
    if accelerator.is_cpu:
        prepare_cpu()  # affects both models
    overrides = ["model=gpt_125m", f"model.layers={options.layers}", "model.vocabulary=8192",
                 f"model.hidden={options.hidden}", f"model.heads={options.heads}",
                 f"model.ffn={4 * options.hidden}",
                 "parallel.pipeline=1", f"data.sequence_length={options.sequence}",
                 "data.micro_batch=2", "data.global_batch=4"]  # fmt: skip
    config = decode(compose(overrides))
    with groups_of_one_rank(accelerator.device) as groups:
        rows = [measure(config, p, accelerator, groups, options) for p in options.precision]
    names = [name.replace("_", " ") for name in (*rows[0]["seconds"], *rows[0]["ratios"])]
    cells = [
        [row["precision"], *(f"{1e3 * seconds:.0f} ms" for seconds in row["seconds"].values()),
         *(f"{ratio:.3f}" for ratio in row["ratios"].values())]
        for row in rows
    ]  # fmt: skip
    title = (
        f"one step, {options.layers} layers of width {options.hidden}, {accelerator.name}, "
        f"torch {torch.__version__}"
    )
    print_table(title, ["precision", *names], cells)
    threads = torch.get_num_threads()
    write_json(options, {"device": accelerator.name, "threads": threads, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
