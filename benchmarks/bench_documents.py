"""Compare training steps with separate documents, windows and capped scores with plain attention.

    python -m benchmarks.bench_documents            # 8,192 tokens per sample
    python -m benchmarks.bench_documents --quick    # smoke test
    python -m benchmarks.bench_documents --json benchmarks/results/documents_<cpu>_<date>.json

All contenders train the same GPT in one process, on the same tokens, and take turns. `joined` is
plain causal attention. A sample has documents of random lengths, whose logarithm is normally
distributed; the table has the mean length. The table has the median time of a step, the most
memory that tensors hold during a step beyond the states of the model, and both relative to
`joined`. Memory that kernels allocate for themselves is not counted.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))

import numpy as np
import torch.distributed as dist
from rich.table import Table

from benchmarks.bench_options import bench_parser, parse_bench
from benchmarks.bench_step import our_step
from benchmarks.testbed import machine
from benchmarks.testbed.held_bytes import HeldBytes
from frontier_llm.cli.compose import compose
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import at_least, run_command
from frontier_llm.config import RunConfig, decode
from frontier_llm.data.batch import Batch
from frontier_llm.data.document_rows import Row, document_batch
from frontier_llm.device.accelerator import Accelerator, keep_freed_memory
from frontier_llm.geometry.grid import Grid
from frontier_llm.parallel import megatron_cpu
from frontier_llm.parallel.groups import Groups, destroy_groups, make_groups
from frontier_llm.units import MIB

QUICK = {"layers": 1, "hidden": 64, "sequence": 256, "mean": 40, "window": 64, "rounds": 1}
SPREAD = 1.0
"""Standard deviation of the logarithm of a document's length."""


def document_lengths(tokens: int, mean: int) -> np.ndarray:
    """Draw lengths of documents that fill a sample of `tokens` tokens; the last one is cut."""
    draw = np.random.default_rng(0)
    lengths = draw.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, tokens).astype(np.int64) + 1
    ends = np.minimum(np.cumsum(lengths), tokens)
    return np.diff(np.unique(ends), prepend=0)


def contenders(options: Any) -> dict[str, list[str]]:
    """Return the settings of each contender, by name."""
    window = [f"model.window={options.window}"]
    separate = ["data.documents=separate"]
    return {
        "joined": [],
        "separate": separate,
        f"window {options.window}": window,
        f"separate, window {options.window}": [*separate, *window],
        "capped scores": ["model.attention_softcap=50"],
    }


def make_batch(config: RunConfig, mean: int) -> Batch:
    """Return a micro-batch of one sample with random tokens."""
    length = config.data.sequence_length
    draw = np.random.default_rng(1)
    tokens = draw.integers(config.model.vocabulary, size=length + 1)
    row = Row(tokens, document_lengths(length, mean), continues=True)
    separate = config.data.documents == "separate"
    return document_batch([row], [0], separate=separate)


def measure(
    configs: dict[str, RunConfig], mean: int, accelerator: Accelerator, groups: Groups, rounds: int
) -> list[dict[str, Any]]:
    """Time the contenders in turns; the first turn of each measures memory and is not timed."""
    steps: dict[str, Callable[[], None]] = {}
    for name, config in configs.items():
        run = our_step(
            config, "fp32" if accelerator.is_cpu else "bf16", accelerator, groups, "torch"
        )
        batch = make_batch(config, mean).to(accelerator.device)
        steps[name] = lambda run=run, batch=batch: run([batch])  # type: ignore[misc]
    peaks, seconds = {}, {name: list[float]() for name in steps}
    for name, step in steps.items():
        with HeldBytes() as held:
            step()
        peaks[name] = held.peak / MIB
    for _ in range(rounds):
        for name, step in steps.items():
            accelerator.synchronize()
            start = time.perf_counter()
            step()
            accelerator.synchronize()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return [
        {
            "contender": name,
            "seconds": medians[name],
            "peak_mib": peaks[name],
            "seconds_over_joined": medians[name] / medians["joined"],
            "peak_over_joined": peaks[name] / peaks["joined"],
            "rounds": seconds[name],
        }
        for name in steps
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON; return the exit code."""
    parser = bench_parser(__doc__, rounds=3, quick="one short layer, one round")
    add = parser.add_argument
    add("--layers", type=at_least(1), default=2, help="layers of the model (default 2)")
    add("--hidden", type=at_least(1), default=512, help="width of the model (default 512)")
    add("--sequence", type=at_least(1), default=8192, help="tokens per sample (default 8192)")
    add("--mean", type=at_least(1), default=500, help="mean length of a document (default 500)")
    add("--window", type=at_least(1), default=1024, help="tokens of a window (default 1024)")
    options = parse_bench(parser, arguments, QUICK)
    accelerator = Accelerator.of_rank(0)
    if accelerator.is_cpu:
        megatron_cpu.install()
        keep_freed_memory()
    common = ["model=gpt_125m", f"model.layers={options.layers}", "model.vocabulary=8192",
              f"model.hidden={options.hidden}", "model.heads=8", "model.positions=rotary",
              f"model.ffn={4 * options.hidden}", "parallel.pipeline=1",
              f"data.sequence_length={options.sequence}", "data.micro_batch=1",
              "data.global_batch=1"]  # fmt: skip
    configs = {
        name: decode(compose([*common, *more])) for name, more in contenders(options).items()
    }
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo" if accelerator.is_cpu else "nccl", f"file://{folder}/store", rank=0, world_size=1
        )
        groups = make_groups(Grid(1, 1, 1, 1), head_stage=0)
        rows = measure(configs, options.mean, accelerator, groups, options.rounds)
        destroy_groups()
    lengths = document_lengths(options.sequence, options.mean)
    title = (
        f"one step, {options.layers} layers of width {options.hidden}, {options.sequence} tokens, "
        f"{len(lengths)} documents of {lengths.mean():.0f} tokens on average, {accelerator.name}"
    )
    table = Table(title=title)
    for heading in ("contender", "seconds", "over joined", "peak MiB", "over joined"):
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    for row in rows:
        table.add_row(
            row["contender"],
            f"{row['seconds']:.2f}",
            f"{row['seconds_over_joined']:.2f}",
            f"{row['peak_mib']:.0f}",
            f"{row['peak_over_joined']:.2f}",
        )
    wide_console().print(table)
    if options.json:
        facts = {**machine.about(), "device": accelerator.name, "documents": len(lengths),
                 "sequence": options.sequence, "rows": rows}  # fmt: skip
        options.json.write_text(json.dumps(facts, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
