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

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn

from benchmarks.bench_options import bench_parser, parse_bench
from benchmarks.peers.plain_gpt import PlainGpt
from benchmarks.testbed import machine
from frontier_llm.cli.compose import compose
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import at_least, run_command
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.config import RunConfig, decode
from frontier_llm.data.batch import Batch
from frontier_llm.device.accelerator import Accelerator, keep_freed_memory
from frontier_llm.device.kernels import resolve
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.build import build_model
from frontier_llm.parallel import megatron_cpu
from frontier_llm.parallel.groups import Groups, destroy_groups, make_groups
from frontier_llm.trainer.progress import LossScale
from frontier_llm.trainer.states import shard
from frontier_llm.trainer.step import TrainStep

LEARNING_RATE = 1e-4
"""Learning rate of both models; the speed does not depend on it."""
QUICK = {"layers": 1, "sequence": 64, "steps": 1}


def plain_step(
    config: RunConfig, precision: str, device: torch.device, *, compiles: bool = False
) -> Callable[..., None]:
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


def our_step(
    config: RunConfig, precision: str, accelerator: Accelerator, groups: Groups, kernels_name: str
) -> Callable[..., None]:
    """Return a function that runs one step of frontier_llm; `kernels_name` is the key `kernels`."""
    kernels = resolve(kernels_name, accelerator.device)
    layout = ResolvedLayout.resolve(config, 1, 1, precision=precision)
    model = build_model(layout, groups, accelerator.device, kernels, config.trainer.seed)
    traffic = Traffic(groups.grid, 0)
    states = shard(config, model, groups, traffic)
    scale = LossScale(config.precision, precision)
    step = TrainStep(model, states, groups, config, scale, traffic)

    def run(batches: list[Batch]) -> None:
        step.run(1, batches, LEARNING_RATE)

    return run


def measure(
    config: RunConfig,
    precision: str,
    accelerator: Accelerator,
    groups: Groups,
    steps: int,
    *,
    compiled: bool,
) -> dict[str, Any]:
    """Time the models in turns; the first turn of each is a warm-up and is not counted."""
    device = accelerator.device
    contenders = {
        "ours": our_step(config, precision, accelerator, groups, "auto"),
        "plain": plain_step(config, precision, device),
    }
    if compiled:
        contenders |= {
            "ours_compiled": our_step(config, precision, accelerator, groups, "compiled"),
            "plain_compiled": plain_step(config, precision, device, compiles=True),
        }
    batches = random_batches(config, accelerator.device)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(steps + 1):
        for name, step in contenders.items():
            accelerator.synchronize()
            start = time.perf_counter()
            step(batches)
            accelerator.synchronize()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    return {
        "precision": precision,
        "seconds": medians,
        "ratios": {
            f"{ours}/{plain}": medians[ours] / medians[plain]
            for ours in contenders
            for plain in contenders
            if ours.startswith("ours") and plain.startswith("plain")
        },
        "all_seconds": {name: times[1:] for name, times in seconds.items()},
    }


def random_batches(config: RunConfig, device: torch.device) -> list[Batch]:
    """Return the micro-batches of one step, with random tokens."""
    data = config.data
    shape = (data.micro_batch, data.sequence_length + 1)
    positions = torch.arange(data.sequence_length).expand(data.micro_batch, -1)
    batches = []
    for _ in range(data.global_batch // data.micro_batch):
        rows = torch.randint(config.model.vocabulary, shape)
        batches.append(Batch(rows[:, :-1], rows[:, 1:], positions).to(device))
    return batches


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each precision, print the table, write the JSON; return the exit code."""
    parser = bench_parser(__doc__, quick="one short layer, one step")
    add = parser.add_argument
    add("--layers", type=at_least(1), default=4, help="layers of the model (default 4)")
    add("--hidden", type=at_least(1), default=768, help="width of the model (default 768)")
    add("--heads", type=at_least(1), default=12, help="attention heads (default 12)")
    add("--sequence", type=at_least(1), default=512, help="tokens per sample (default 512)")
    add("--steps", type=at_least(1), default=7, help="timed steps per model (default 7)")
    add("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"],
        help="precision of the computation (default both)")  # fmt: skip
    add("--compiled", action="store_true", help="also measure both models with compiled layers")
    options = parse_bench(parser, arguments, QUICK)
    accelerator = Accelerator.of_rank(0)
    if accelerator.is_cpu:
        megatron_cpu.install()
        keep_freed_memory()  # affects both models
    overrides = ["model=gpt_125m", f"model.layers={options.layers}", "model.vocabulary=8192",
                 f"model.hidden={options.hidden}", f"model.heads={options.heads}",
                 f"model.ffn={4 * options.hidden}",
                 "parallel.pipeline=1", f"data.sequence_length={options.sequence}",
                 "data.micro_batch=2", "data.global_batch=4"]  # fmt: skip
    config = decode(compose(overrides))
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo" if accelerator.is_cpu else "nccl", f"file://{folder}/store", rank=0, world_size=1
        )
        groups = make_groups(Grid(1, 1, 1, 1), head_stage=0)
        rows = [
            measure(
                config, precision, accelerator, groups, options.steps, compiled=options.compiled
            )
            for precision in options.precision
        ]
        destroy_groups()
    table = Table(title=f"one step, {options.layers} layers of width {options.hidden}, "
                        f"{accelerator.name}, torch {torch.__version__}")  # fmt: skip
    for heading in ("precision", *rows[0]["seconds"], *rows[0]["ratios"]):
        table.add_column(heading.replace("_", " "), justify="right")
    for row in rows:
        times = (f"{seconds * 1e3:.0f} ms" for seconds in row["seconds"].values())
        table.add_row(row["precision"], *times, *(f"{r:.3f}" for r in row["ratios"].values()))
    wide_console().print(table)
    if options.json:
        facts = {**machine.about(), "device": accelerator.name,
                 "threads": torch.get_num_threads(), "rows": rows}  # fmt: skip
        options.json.write_text(json.dumps(facts, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
