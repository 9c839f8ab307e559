"""Compare sharded data parallelism with other libraries: the same GPT on the same ranks.

    python -m benchmarks.bench_sharding                         # 2 and 4 ranks, fp32 and bf16
    python -m benchmarks.bench_sharding --quick                 # smoke test, half a minute
    python -m benchmarks.bench_sharding --deepspeed --ranks 2   # installs and compares DeepSpeed
    sudo .venv/bin/python -m benchmarks.bench_sharding --link 1gbit    # one node per rank
    sudo .venv/bin/python -m benchmarks.bench_sharding --ranks 8 --ranks-per-node 4 \
        --link 200mbit --ranks-per-package 2 --package-link 1gbit      # 2 nodes of 2 packages
    sudo .venv/bin/python -m benchmarks.bench_sharding --ranks 8 --link 1gbit --precision fp32 \
        --contenders context-documents context-zigzag context-gather context-heads \
        --baseline context-gather --layers 2 --hidden 128 --vocabulary 256 --samples 1 \
        --sequence 2048      # samples of web text that are cut over context ranks
    python -m benchmarks.bench_sharding --json benchmarks/results/sharding_<cpu>_<date>.json

A contender is one way to train, in forked CPU ranks with gloo. Contenders take turns: A B C, C B A,
... and a round is one turn of each. In a turn the ranks start, warm up and time some steps. All
contenders use AdamW with gradient clipping at 1.0 and the same random tokens. In bf16 ours, FSDP2
and DeepSpeed send parameters and scattered gradients in bf16. ddp uses autocast over fp32
parameters and sends gradients in fp32. Contenders with samples that are cut over context ranks:
peers/cut_peer.py.

The table has one row per contender:
    tokens/s     speed of all ranks together; median over rounds
    of BASELINE  tokens/s divided by the baseline's in the same round; median over rounds
    planned      the same ratio as the planner predicts it, with --plan
    idle %       idle share of all cores during the timed steps; median over rounds
    own MiB      peak resident memory minus the memory before the model was built (model, states,
                 buffers, activations), of the rank that uses most
    peak MiB     peak resident memory (ru_maxrss) with all libraries, whose memory the ranks share
    sent MB      sent per rank and step between nodes, by the counters of the network interfaces,
                 without headers; with packages also between packages
    counted MB   the same as counted by frontier_llm (`sent_bytes` in metrics.jsonl)
MB are millions of bytes. Other values that differ between ranks are means over ranks.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # pools do not survive a fork

from benchmarks.harness import (
    MEGA,
    Contender,
    add_numbers,
    bench_parser,
    fixed,
    mebibytes,
    parse_bench,
    print_table,
    progress,
    take_turns,
    threads_of,
    write_json,
)
from benchmarks.peers import deepspeed_env
from benchmarks.peers.contenders import BY_DEFAULT, CUTS, DEEPSPEED, SpeedPeer, find
from benchmarks.peers.planned import calibrated_cluster, planned_seconds
from benchmarks.peers.turn import Precision, Turn, TurnFigures, measure
from benchmarks.testbed.forked import on_ranks
from benchmarks.testbed.namespaces import Packages, namespaces_of_ranks
from benchmarks.testbed.shape import Shape
from frontier_llm.cli.options import at_least, run_command
from frontier_llm.errors import ConfigError

QUICK = {"layers": 2, "hidden": 64, "heads": 4, "vocabulary": 512, "sequence": 64,
         "ranks": [2], "rounds": 1, "warmup": 1, "steps": 2}  # fmt: skip
"""Options of --quick."""
NUMBERS = (
    ("steps", 1, 5, "timed steps per turn"),
    ("warmup", 0, 2, "steps before the timed ones"),
    ("micro-batches", 1, 1, "micro-batches per rank and step"),
    ("samples", 1, 2, "samples per micro-batch"),
    ("layers", 1, 8, "layers of the model"),
    ("hidden", 1, 512, "hidden size"),
    ("heads", 1, 8, "attention heads; must divide --hidden"),
    ("vocabulary", 1, 8192, "rows of the embedding"),
    ("sequence", 1, 256, "tokens per sample"),
)
"""Integer options: name, minimum, default, help."""


LIMIT_SECONDS = 600
"""Time limit per turn."""
Outcome = Contender[TurnFigures]


@dataclass(frozen=True)
class Case:
    """Conditions that are the same for all contenders, and the contenders."""

    ranks: int
    precision: Precision
    peers: tuple[SpeedPeer, ...]


def speed(turn: TurnFigures) -> float:
    """Return the tokens per second of a turn."""
    return turn.tokens_per_second


def row_of(outcome: Outcome, base: Outcome, planned: dict[str, float]) -> dict[str, Any]:
    """Return all values of a contender over its rounds; `planned` are predicted seconds by name."""
    rounds, ratios = outcome.rounds, outcome.ratios(base, speed)
    own, other = planned.get(outcome.name), planned.get(base.name)
    row: dict[str, Any] = {
        "contender": outcome.name,
        "baseline": base.name,
        "error": outcome.error,
        "median_ratio": median(ratios) if ratios else None,
        "ratios": ratios,
        "planned_seconds": own,
        "planned_ratio": other / own if own and other else None,
    }
    if rounds:
        row |= {
            "median_tokens_per_second": outcome.median(speed),
            "tokens_per_second": outcome.values(speed),
            "step_seconds": [turn.seconds for turn in rounds],
            "first_loss": rounds[-1].losses[0][0],
            "last_loss": rounds[-1].losses[0][-1],
            "parameters": rounds[-1].parameters,
            "peak_bytes": max(turn.peak_bytes for turn in rounds),
            "own_bytes": max(turn.own_bytes for turn in rounds),
            "sent_bytes": [t.sent_bytes for t in rounds if t.sent_bytes is not None],
            "counted_bytes": rounds[-1].counted_bytes,
            "idle_share": [t.idle_share for t in rounds if t.idle_share is not None],
        }
    return row


def print_speeds(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print a table with one row per contender; the top of this file explains the columns."""
    ran = [row for row in rows if "tokens_per_second" in row]
    has_links = any(row["sent_bytes"] for row in ran)
    has_plan = any(row["planned_ratio"] is not None for row in ran)
    headings = [
        "contender", "tokens/s", "min..max", f"of\n{rows[0]['baseline']}", *["planned"] * has_plan,
        "idle\n%", "own\nMiB", "peak\nMiB", *["sent\nMB"] * has_links, "counted\nMB",
    ]  # fmt: skip

    def cells(row: dict[str, Any]) -> list[str]:
        if row not in ran:
            return [row["contender"], "failed"]
        speeds, idle, sent = row["tokens_per_second"], row["idle_share"], row["sent_bytes"]
        return [
            row["contender"] + (" (failed later)" if row["error"] else ""),
            f"{row['median_tokens_per_second']:.0f}",
            f"{min(speeds):.0f}..{max(speeds):.0f}",
            fixed(row["median_ratio"]),
            *[fixed(row["planned_ratio"])] * has_plan,
            fixed(median(idle), 0, 100) if idle else "-",
            mebibytes(row["own_bytes"]),
            mebibytes(row["peak_bytes"]),
            *[fixed(median(sent) if sent else None, 2, 1 / MEGA)] * has_links,
            fixed(row["counted_bytes"], 2, 1 / MEGA),
        ]

    print_table(title, headings, map(cells, rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the contenders of the command line; return the exit code."""
    options = parse(arguments)
    results, errors = [], []
    for case in make_cases(options):
        title = f"{case.ranks} ranks, {case.precision}, {options.link or 'loopback'}"
        outcomes = compare(title, case, options)
        planned = plans(case, options) if options.plan else {}
        base = baseline_of(outcomes, options.baseline)
        rows = [row_of(outcome, base, planned) for outcome in outcomes]
        print_speeds(title, rows)
        errors += [f"{one.name}: {one.error}" for one in outcomes if one.error]
        results.append({
            "ranks": case.ranks,
            "precision": case.precision,
            "link": options.link,
            "threads": threads_of(options, case.ranks),
            "shape": asdict(Shape.of(options)),
            "rows": rows,
        })  # fmt: skip
    print(*errors, sep="\n", end="", file=sys.stderr)
    write_json(options, {"cases": results})
    return 1 if errors else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = bench_parser(__doc__, rounds=5, quick="a tiny model, 2 ranks, 1 round")
    add = parser.add_argument
    add("--ranks", type=at_least(1), nargs="+", default=[2, 4], metavar="N", help="default 2 4")
    add("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"],
        help="precision of the computation (default both)")  # fmt: skip
    others = ", ".join(peer.name for peer in (*DEEPSPEED, *CUTS))
    add("--contenders", nargs="+", metavar="NAME", help=f"default: {' '.join(BY_DEFAULT)}; also: "
        f"{others}, ours-P-G-O for any sharding factors")  # fmt: skip
    add("--deepspeed", action="store_true",
        help=f"also compare DeepSpeed; makes {deepspeed_env.FOLDER.name} (1 GB) once")  # fmt: skip
    add("--baseline", default="ddp", metavar="NAME", help="baseline of the ratios (default ddp)")
    add("--link", metavar="RATE",
        help="simulate nodes with links of this rate (1gbit); needs root")  # fmt: skip
    add("--ranks-per-node", type=at_least(1), default=1, metavar="N",
        help="ranks that share a node (default 1)")  # fmt: skip
    add("--ranks-per-package", type=at_least(1), default=1, metavar="N",
        help="ranks that share a package and its link (default 1: no packages)")  # fmt: skip
    add("--package-link", metavar="RATE",
        help="rate of the links of packages inside a node (default: that of --link)")  # fmt: skip
    add_numbers(parser, NUMBERS)
    add("--threads", type=at_least(1), metavar="N",
        help="CPU threads per rank (default: cores / ranks)")  # fmt: skip
    add("--plan", action="store_true",
        help="also predict the steps of our contenders, after a calibration")  # fmt: skip
    return parse_bench(parser, arguments, QUICK)


def make_cases(options: argparse.Namespace) -> list[Case]:
    """Return all conditions, each with the contenders that can run under it.

    Raises:
        ConfigError: a contender is unknown, none can run on this number of ranks, or the ranks do
            not fill the nodes.
    """
    names = list(dict.fromkeys(options.contenders or BY_DEFAULT))
    if options.deepspeed:
        names += [peer.name for peer in DEEPSPEED if peer.name not in names]
    peers = [find(name) for name in names]
    if options.ranks_per_node % options.ranks_per_package:
        raise ConfigError(
            "--ranks-per-package", options.ranks_per_package,
            f"a divisor of --ranks-per-node={options.ranks_per_node}", "change one of them",
        )  # fmt: skip
    if options.package_link and (options.link is None or options.ranks_per_package == 1):
        raise ConfigError(
            "--package-link", f"{options.package_link} without packages",
            "simulated nodes with packages", "set --link and --ranks-per-package, or omit it",
        )  # fmt: skip
    for ranks in options.ranks:
        if ranks % options.ranks_per_node:
            raise ConfigError(
                "--ranks", ranks, f"a multiple of --ranks-per-node={options.ranks_per_node}",
                "change one of them",
            )  # fmt: skip
        if not any(peer.fits(ranks) for peer in peers):
            fits = ", ".join(f"{c.name}: multiples of {c.ranks_multiple}" for c in peers)
            raise ConfigError(
                "--contenders", f"{' '.join(names)} on {ranks} ranks",
                f"one that can run on them ({fits})", "change --contenders or --ranks",
            )  # fmt: skip
    return [
        Case(ranks, precision, tuple(c for c in peers if c.fits(ranks)))
        for ranks in options.ranks
        for precision in options.precision
    ]


def compare(title: str, case: Case, options: argparse.Namespace) -> list[Outcome]:
    """Run the turns of all contenders of a case, each rank in the namespace of its node."""
    for peer in case.peers:
        if peer.builder != "deepspeed_peer":
            importlib.import_module(f"benchmarks.peers.{peer.builder}")
    per_node, per_package = options.ranks_per_node, options.ranks_per_package
    packages = Packages(per_node // per_package, options.package_link) if per_package > 1 else None
    with (
        namespaces_of_ranks(case.ranks, options.link, per_node, packages) as places,
        progress(title, options.rounds * len(case.peers)) as advance,
    ):

        def take(peer: SpeedPeer) -> TurnFigures:
            turn = replace(turn_of(peer, case, options), namespaces=places)
            return TurnFigures.of(turn, run_turn(peer, turn))

        outcomes = [Contender(peer.name, partial(take, peer)) for peer in case.peers]
        take_turns(outcomes, options.rounds, lambda name: advance(f"{title}: {name}"))
    return outcomes


def run_turn(peer: SpeedPeer, turn: Turn) -> list[Any]:
    """Take a turn; return the measurements of its ranks.

    Raises:
        LaunchError: the turn failed; the message has the traceback of the first rank that failed.
    """
    if peer.builder == "deepspeed_peer":
        return deepspeed_env.run_deepspeed(turn)
    make = importlib.import_module(f"benchmarks.peers.{peer.builder}").make
    return on_ranks(
        measure, turn.ranks, make, turn, namespaces=turn.namespaces, limit_seconds=LIMIT_SECONDS
    )


def plans(case: Case, options: argparse.Namespace) -> dict[str, float]:
    """Return the predicted seconds of a step of our contenders, by name."""
    cluster = calibrated_cluster(case.ranks)
    rates = (options.link, options.package_link)
    return {
        peer.name: planned_seconds(turn_of(peer, case, options), cluster, *rates)
        for peer in case.peers
        if peer.builder == "ours"
    }


def baseline_of(outcomes: Sequence[Outcome], name: str) -> Outcome:
    """Return the contender `name`; if it did not run, the first one that ran."""
    ran = [outcome for outcome in outcomes if outcome.rounds] or outcomes
    return next((outcome for outcome in ran if outcome.name == name), ran[0])


def turn_of(peer: SpeedPeer, case: Case, options: argparse.Namespace) -> Turn:
    """Return the turn of a contender."""
    return Turn(
        peer.name, case.ranks, case.precision, Shape.of(options), options.samples,
        options.micro_batches, options.warmup, options.steps, threads_of(options, case.ranks),
        options.ranks_per_node, options.ranks_per_package,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_command(main))
