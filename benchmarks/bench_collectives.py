"""Measure quantised collectives: quantisation alone, then gathers and reductions between two nodes.

    python -m benchmarks.bench_collectives                   # two ranks on loopback
    sudo .venv/bin/python -m benchmarks.bench_collectives \
        --links loopback 1gbit 200mbit --ranks-per-node 1 2  # two nodes with links of these rates
    python -m benchmarks.bench_collectives --quick           # smoke test
    python -m benchmarks.bench_collectives --json benchmarks/results/collectives_<cpu>_<date>.json

The codec is the code that quantises and dequantises. The first table has its speed with one thread,
in GB/s of the unquantised buffer (fp32 or bf16). `copy` is a copy of the same buffer, whose speed
memory limits. `rotated by 64` are runs of 64 elements. `add 8` adds the messages of eight ranks.
`difference` quantises the difference to a base in bf16, and `add difference` adds a decoded one.
`feedback` quantises with a residual in bf16 or int8. On a CPU the CPU time of the thread is
measured, which other processes hardly affect.

The second table has gathers and reductions of a buffer of --elements elements on two nodes. A flow
is one way of communicating: `gather` and `reduce` go over all ranks in one hop, `two hops` reduces
inside the nodes and then between them, with the same format in both hops. Formats take turns. Times
are medians over rounds, of the slowest rank. `speed over bf16` is the time of bf16 divided by the
time of this format in the same round. `MB between nodes` are the bytes that a rank sends to other
nodes, as counted by frontier_llm.

The last table cuts --cut-samples samples of 131,072 tokens over 8 context ranks, with documents
whose lengths are drawn: by the lengths of their documents, blindly as a zig-zag, or in order. `MB`
are the keys and values that all ranks send in the forward pass of a layer of Llama 3 8B, and
`gathered` those without regard to what is read. `balance` are the pairs of queries and keys of the
rank with most of them, relative to the mean.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from benchmarks.harness import (
    bench_parser,
    parse_bench,
    print_table,
    ratios,
    write_json,
)
from benchmarks.testbed.cut_texts import cut_figures
from benchmarks.testbed.forked import on_ranks
from benchmarks.testbed.namespaces import namespaces_of_ranks
from frontier_lab.option_values import positive
from frontier_llm.cli.options import at_least, run_command
from frontier_llm.collectives.blockwise import BlockKernels
from frontier_llm.collectives.handles import Chain
from frontier_llm.collectives.kernel_choice import choose_kernels
from frontier_llm.collectives.residual import Residual
from frontier_llm.collectives.slots import Slots
from frontier_llm.collectives.torch_blockwise import TorchKernels
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.collectives.transport import Transport
from frontier_llm.geometry.formats import BF16, FP32, Format, LevelFormats, StateFormats
from frontier_llm.geometry.grid import Grid

FORMATS = (FP32, BF16, Format("int8", 256, 2), Format("int4", 256, 2))
"""The quantised formats have the block and scale sizes of conf/collectives/."""
ROTATIONS = (64, 256)
"""Elements per run of the rotated int4 formats of the codec's table."""
SPEEDS = ("quantise", "dequantise", "add", "add_eight", "difference", "add_difference", "feedback",
          "feedback_int8")  # fmt: skip
"""Columns of the codec's table."""
CodecFigure = dict[str, Any]
"""A row of it: kernels, quantised format, type of the unquantised buffer, and each of `SPEEDS` in
GB/s of the unquantised side."""
FLOW_HEADINGS = ("flow", "format", "ms", "min..max", "speed over bf16", "speed over fp32",
                 "MB between nodes")  # fmt: skip
CUT_HEADINGS = ("text", "cut", "MB", "of gathered", "balance", "worst balance")
NODES = 2
"""Number of simulated nodes."""
QUICK = {"elements": 1 << 14, "codec_elements": 1 << 16, "codec_seconds": 0.01, "rounds": 1,
         "cut_samples": 2}  # fmt: skip
Flow = str
"""`gather`, `reduce` or `two hops`."""


@dataclass
class FlowFigure:
    """Measurements of one flow in one format under one set of conditions."""

    link: str
    ranks_per_node: int
    flow: Flow
    format: str
    seconds: list[float]
    """Time of the slowest rank, one value per round."""
    inter_bytes: float
    """Bytes per rank between nodes, as counted."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements of the command line; return the exit code."""
    options = parse(arguments)
    codec = list(codec_figures(options.codec_elements, options.codec_seconds))
    names = ("kernels", "format", "dtype")
    cells = [
        [*(one[name] for name in names), *(f"{one[speed]:.2f}" for speed in SPEEDS)]
        for one in codec
    ]
    headings = (*names, *(speed.replace("_", " ") for speed in SPEEDS))
    print_table("Codec, one thread, GB/s", headings, cells, left=3)
    flows: list[FlowFigure] = []
    for per_node in options.ranks_per_node:
        for link in options.links:
            measured = flow_figures(link, per_node, options)
            title = f"{NODES} nodes x {per_node}, {link}"
            print_table(title, FLOW_HEADINGS, flow_cells(measured), left=2)
            flows += measured
    cuts = list(cut_figures(options.cut_samples))
    cells = [
        [text, cut, f"{sent / 1e6:.0f}", *(f"{part:.3f}" for part in parts)]
        for text, cut, sent, *parts in map(astuple, cuts)
    ]
    print_table("Samples cut over 8 context ranks", CUT_HEADINGS, cells, left=2)
    facts = {
        "elements": options.elements,
        "codec_elements": options.codec_elements,
        "codec": codec,
        "flows": [asdict(figure) for figure in flows],
        "cut_samples": options.cut_samples,
        "cuts": [asdict(figure) for figure in cuts],
    }
    write_json(options, facts)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = bench_parser(__doc__, rounds=7, quick="small buffers, one round")
    add = parser.add_argument
    add("--links", nargs="+", default=["loopback"], metavar="RATE",
        help="loopback (default), or rates such as 1gbit (need root)")  # fmt: skip
    add("--ranks-per-node", type=at_least(1), nargs="+", default=[1], metavar="N",
        help="default 1")  # fmt: skip
    add("--elements", type=at_least(1), default=3 << 20,
        help="elements of the buffer (default 3 Mi, about one layer)")  # fmt: skip
    add("--codec-elements", type=at_least(1), default=16 << 20,
        help="elements for the codec (default 16 Mi)")  # fmt: skip
    add("--cut-samples", type=at_least(1), default=1000,
        help="samples of each text that are cut (default 1000)")  # fmt: skip
    add("--codec-seconds", type=positive, default=0.3,
        help="time per row of the codec (default 0.3)")  # fmt: skip
    return parse_bench(parser, arguments, QUICK)


def codec_figures(elements: int, limit: float) -> Iterator[CodecFigure]:
    """Time the functions of the codec with all kernels that work here, `limit` seconds each."""
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fast = choose_kernels("auto", device)
    slow = TorchKernels()
    implementations: list[BlockKernels] = [slow] if fast.name == slow.name else [slow, fast]
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randn(elements, device=device).to(dtype)
        copy_seconds = _seconds(partial(torch.empty_like(values).copy_, values), limit)
        copy = values.nbytes / copy_seconds / 1e9
        yield _codec_row("copy", "-", dtype, [copy] * len(SPEEDS))
        rotated = [replace(FORMATS[-1], rotation_elements=run) for run in ROTATIONS]
        for kernels in implementations:
            for format_ in (*FORMATS[2:], *rotated):
                yield _codec_figure(kernels, format_, values, limit)


def _codec_row(
    kernels: str, format_: str, dtype: torch.dtype, speeds: Iterable[float]
) -> CodecFigure:
    names = {"kernels": kernels, "format": format_, "dtype": str(dtype).removeprefix("torch.")}
    return {**names, **dict(zip(SPEEDS, speeds, strict=True))}


def _codec_figure(
    kernels: BlockKernels, format_: Format, values: torch.Tensor, limit: float
) -> CodecFigure:
    """Time one implementation of the codec in one format, `limit` seconds per function."""
    elements, device = values.numel(), values.device
    size = format_.slot_bytes(elements, 1, elements)
    data = torch.zeros(1, size, dtype=torch.uint8, device=device)
    slots = Slots(data, format_, elements, elements, torch.bfloat16)
    eight = replace(slots, data=torch.zeros(8, size, dtype=torch.uint8, device=device))
    parts, out = values[None], torch.zeros_like(values)[None]
    base, total = parts.roll(1, 1).bfloat16(), torch.zeros(elements, device=device)
    in_bf16 = Residual.zeros(1, elements, device)
    in_int8 = Residual.zeros(1, elements, device, format_.block_elements, decay=0.8)
    works = (
        (parts, 1, partial(kernels.quantise, parts, slots)),
        (out, 1, partial(kernels.dequantise, slots, out)),
        (total, 1, partial(kernels.add_up, slots, total)),
        (total, 8, partial(kernels.add_up, eight, total)),
        (parts, 1, partial(kernels.quantise, parts, slots, base=base)),
        (out, 1, partial(kernels.dequantise, slots, out, add=True)),
        (parts, 1, partial(kernels.quantise, parts, slots, in_bf16)),
        (parts, 1, partial(kernels.quantise, parts, slots, in_int8)),
    )
    speeds = (count * wide.nbytes / _seconds(work, limit) / 1e9 for wide, count, work in works)
    run = format_.rotation_elements
    name = f"{format_.name} rotated by {run}" if run else format_.name
    return _codec_row(kernels.name, name, values.dtype, speeds)


def _seconds(work: Callable[[], object], limit: float) -> float:
    """Call `work` for `limit` seconds; return its median time.

    On a GPU this is wall time, on a CPU the CPU time of this thread.
    """
    on_gpu = torch.cuda.is_available()
    clock = time.perf_counter if on_gpu else time.thread_time
    work()
    times: list[float] = []
    while sum(times) < limit:
        start = clock()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(clock() - start)
    return statistics.median(times)


def flow_figures(link: str, per_node: int, options: argparse.Namespace) -> list[FlowFigure]:
    """Measure all flows in all formats on two nodes."""
    ranks, rate = NODES * per_node, None if link == "loopback" else link
    with namespaces_of_ranks(ranks, rate, per_node) as places:
        found = on_ranks(
            measure_rank, ranks, per_node, options.elements, options.rounds, namespaces=places
        )
    figures = []
    for flow, format_name in found[0]:
        of_ranks = [rank[flow, format_name] for rank in found]
        slowest = [max(times) for times in zip(*(times for times, _ in of_ranks), strict=True)]
        sent = statistics.mean(sent for _, sent in of_ranks)
        figures.append(FlowFigure(link, per_node, flow, format_name, slowest, sent))
    return figures


def measure_rank(
    rank: int, per_node: int, elements: int, rounds: int
) -> dict[tuple[Flow, str], tuple[list[float], float]]:
    """Run as one rank.

    Returns:
        By flow and name of the format: the seconds of each round, and the bytes that this rank
        sends to other nodes.
    """
    torch.set_num_threads(1)
    size = NODES * per_node
    in_node = [dist.new_group([n * per_node + i for i in range(per_node)]) for n in range(NODES)]
    between = [dist.new_group([n * per_node + i for n in range(NODES)]) for i in range(per_node)]
    world = dist.group.WORLD
    hops: dict[Flow, list[Any]] = {"gather": [world], "reduce": [world]}
    if per_node > 1:
        hops["two hops"] = [in_node[rank // per_node], between[rank % per_node]]
    elements = -(-elements // size) * size  # every rank has the same number of elements
    found: dict[tuple[Flow, str], tuple[list[float], float]] = {}
    transports = {format_.name: _transport(rank, size, per_node, format_) for format_ in FORMATS}
    for round_number in range(rounds + 1):
        for flow, groups in hops.items():
            for format_ in FORMATS:
                transport = transports[format_.name]
                transport.traffic.take()  # discard what was counted before
                seconds = _time_flow(transport, flow, groups, format_, elements)
                times, _ = found.setdefault((flow, format_.name), ([], 0.0))
                if round_number:  # the first round only makes connections and buffers
                    times.append(seconds)
                inter_bytes = sum(sent.network for sent in transport.traffic.take().values())
                found[flow, format_.name] = (times, inter_bytes)
    return found


def _transport(rank: int, size: int, per_node: int, format_: Format) -> Transport:
    """Return a transport that sends all states in one format."""
    of_levels = LevelFormats(format_, format_, format_)
    formats = StateFormats(format_, format_, format_, grads=of_levels)
    device = torch.device("cpu")
    return Transport(
        lambda _: formats,
        Traffic(Grid(1, size, 1, per_node), rank),
        choose_kernels("auto", device),
        torch.float32,
        device,
    )


def _time_flow(
    transport: Transport, flow: Flow, groups: Sequence[Any], format_: Format, elements: int
) -> float:
    """Return the seconds of one gather or reduction of `elements` elements over the groups."""
    buffer = torch.randn(elements)
    total = torch.empty(elements // math.prod(group.size() for group in groups))
    dist.barrier()
    start = time.perf_counter()
    if flow == "gather":
        Chain(transport.gather(buffer, groups, format_, elements, flow)).wait()
    else:
        hops = [(group, None) for group in groups]  # no error feedback
        Chain(transport.reduce(buffer, hops, elements, flow, total)).wait()
    return time.perf_counter() - start


def flow_cells(figures: Sequence[FlowFigure]) -> Iterator[list[str]]:
    """Yield the rows of the table of the flows under one set of conditions."""
    for figure in figures:
        by_format = {other.format: other.seconds for other in figures if other.flow == figure.flow}
        seconds = figure.seconds
        speeds = [ratios(by_format[name], seconds) for name in ("bf16", "fp32")]
        yield [
            figure.flow,
            figure.format,
            f"{statistics.median(seconds) * 1e3:.1f}",
            f"{min(seconds) * 1e3:.1f}..{max(seconds) * 1e3:.1f}",
            *(f"{statistics.median(speed):.2f}" for speed in speeds),
            f"{figure.inter_bytes / 1e6:.2f}",
        ]


if __name__ == "__main__":
    sys.exit(run_command(main))
