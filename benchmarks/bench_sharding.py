"""Compare sharded data parallelism with other libraries: the same GPT on the same ranks.

    python -m benchmarks.bench_sharding                         # 2 and 4 ranks, fp32 and bf16
    python -m benchmarks.bench_sharding --quick                 # smoke test, half a minute
    python -m benchmarks.bench_sharding --deepspeed --ranks 2   # installs and compares DeepSpeed
    sudo .venv/bin/python -m benchmarks.bench_sharding --link 1gbit    # one node per rank
    sudo .venv/bin/python -m benchmarks.bench_sharding --ranks 8 --ranks-per-node 4 \
        --link 200mbit --ranks-per-package 2 --package-link 1gbit      # 2 nodes of 2 packages
    python -m benchmarks.bench_sharding --json benchmarks/results/sharding_<cpu>_<date>.json

A contender is one way to train, in forked CPU ranks with gloo. Contenders take turns: A B C, A B C,
... and a round is one turn of each. In a turn the ranks start, warm up and time some steps. All
contenders use AdamW with gradient clipping at 1.0 and the same random tokens. In bf16 ours, FSDP2
and DeepSpeed send parameters and scattered gradients in bf16. ddp uses autocast over fp32
parameters and sends gradients in fp32.

The table has one row per contender:
    tokens/s     speed of all ranks together; median over rounds
    of BASELINE  tokens/s divided by the baseline's in the same round; median over rounds
    planned      the same ratio as the planner predicts it, with --plan
    idle %       idle share of all cores during the timed steps; median over rounds
    own MiB      peak resident memory minus the memory before the model was built (model, states,
                 buffers, activations), of the rank that uses most
    peak MiB     peak resident memory (ru_maxrss) with libraries, whose memory the ranks share
    sent MB      sent per rank and step between nodes, by the counters of the network interfaces;
                 with packages also between packages
    counted MB   the same as counted by frontier_llm (`sent_bytes` in metrics.jsonl)
MB are millions of bytes. Other values that differ between ranks are means over ranks.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.bench_options import bench_parser, parse_bench
from benchmarks.peers import deepspeed_venv
from benchmarks.peers.contenders import BY_DEFAULT, DEEPSPEED, BuilderModule, Contender, find
from benchmarks.peers.planned import calibrated_cluster, planned_seconds
from benchmarks.peers.results import Outcome, make_table
from benchmarks.peers.turn import Precision, Shape, Turn
from benchmarks.peers.workers import TurnFailedError, Workers
from benchmarks.testbed import machine
from benchmarks.testbed.namespaces import Packages, namespaces
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import at_least, positive, run_command
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


@dataclass(frozen=True)
class Case:
    """Conditions that are the same for all contenders, and the contenders."""

    ranks: int
    precision: Precision
    contenders: tuple[Contender, ...]

    def title(self, link: str | None) -> str:
        """Return a title for the table."""
        return f"{self.ranks} ranks, {self.precision}, {link or 'loopback'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the contenders of the command line; return the exit code."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed
    return run(options, wide_console(), wide_console(stderr=True))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = bench_parser(__doc__, rounds=5, quick="a tiny model, 2 ranks, 1 round")
    add = parser.add_argument
    add("--ranks", type=at_least(1), nargs="+", default=[2, 4], metavar="N", help="default 2 4")
    add("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"],
        help="precision of the computation (default both)")  # fmt: skip
    others = ", ".join(peer.name for peer in DEEPSPEED)
    add("--contenders", nargs="+", metavar="NAME", help=f"default: {' '.join(BY_DEFAULT)}; also: "
        f"{others}, ours-P-G-O for any sharding factors")  # fmt: skip
    add("--deepspeed", action="store_true",
        help=f"also compare DeepSpeed; makes {deepspeed_venv.FOLDER.name} (1 GB) once")  # fmt: skip
    add("--baseline", default="ddp", metavar="NAME", help="baseline of the ratios (default ddp)")
    add("--link", metavar="RATE",
        help="simulate nodes with links of this rate (1gbit); needs root")  # fmt: skip
    add("--ranks-per-node", type=at_least(1), default=1, metavar="N",
        help="ranks that share a node (default 1)")  # fmt: skip
    add("--ranks-per-package", type=at_least(1), default=1, metavar="N",
        help="ranks that share a package and its link (default 1: no packages)")  # fmt: skip
    add("--package-link", metavar="RATE",
        help="rate of the links of packages inside a node (default: that of --link)")  # fmt: skip
    for name, least, default, meaning in NUMBERS:
        add(f"--{name}", type=at_least(least), default=default, metavar="N",
            help=f"{meaning} (default {default})")  # fmt: skip
    add("--threads", type=at_least(1), metavar="N",
        help="CPU threads per rank (default: cores / ranks)")  # fmt: skip
    add(
        "--plan",
        action="store_true",
        help="also predict the steps of our contenders, after a calibration of this machine",
    )
    add("--limit", type=positive, default=600, metavar="SECONDS",
        help="time limit per turn (default 600)")  # fmt: skip
    return parse_bench(parser, arguments, QUICK)


def run(options: argparse.Namespace, console: Console, status: Console) -> int:
    """Compare the contenders in all cases; print a table per case, write the JSON.

    Args:
        options: the command line.
        console: console for the tables.
        status: console for progress and errors.

    Raises:
        ConfigError: an option is invalid, or not possible on this machine.
    """
    cases = make_cases(options)
    pythons: dict[BuilderModule, Path] = {}
    contenders = [contender for case in cases for contender in case.contenders]
    if any(contender.builder == "deepspeed_peer" for contender in contenders):
        pythons["deepspeed_peer"] = deepspeed_venv.ensure(status)
    compared, failed = [], False
    with (
        tempfile.TemporaryDirectory(prefix="bench_sharding_") as folder,
        Workers(Path(folder, "log"), pythons) as workers,
    ):
        for case in cases:
            outcomes = compare(case, options, workers, status)
            if options.plan:
                add_plans(outcomes, case, options)
            baseline = _baseline(outcomes, options.baseline)
            console.print(make_table(case.title(options.link), outcomes, baseline))
            for outcome in outcomes:
                if outcome.error:
                    failed = True
                    status.print(f"{outcome.contender}: {outcome.error}", markup=False)
            compared.append((case, [outcome.to_dict(baseline) for outcome in outcomes]))
    if options.json:
        options.json.write_text(json.dumps(_facts(options, compared), indent=1))
    return 1 if failed else 0


def make_cases(options: argparse.Namespace) -> list[Case]:
    """Return all conditions, each with the contenders that can run under it.

    Raises:
        ConfigError: a contender is unknown, none can run on this number of ranks, or the ranks do
            not fill the nodes.
    """
    names = list(dict.fromkeys(options.contenders or BY_DEFAULT))
    if options.deepspeed:
        names += [peer.name for peer in DEEPSPEED if peer.name not in names]
    contenders = [find(name) for name in names]
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
        if not any(contender.fits(ranks) for contender in contenders):
            fits = ", ".join(f"{c.name}: multiples of {c.ranks_multiple}" for c in contenders)
            raise ConfigError(
                "--contenders", f"{' '.join(names)} on {ranks} ranks",
                f"one that can run on them ({fits})", "change --contenders or --ranks",
            )  # fmt: skip
    return [
        Case(ranks, precision, tuple(c for c in contenders if c.fits(ranks)))
        for ranks in options.ranks
        for precision in options.precision
    ]


def compare(
    case: Case, options: argparse.Namespace, workers: Workers, status: Console
) -> list[Outcome]:
    """Run the turns of all contenders of a case."""
    outcomes = {contender.name: Outcome(contender.name) for contender in case.contenders}
    turns = [(index, contender) for index in range(options.rounds) for contender in case.contenders]
    with ExitStack() as stack:
        places = stack.enter_context(_namespaces_of_ranks(case.ranks, options))
        bar = stack.enter_context(_progress(status))
        task = bar.add_task(case.title(options.link), total=len(turns), now="")
        for index, contender in turns:
            bar.update(task, now=f"round {index + 1}: {contender.name}")
            outcome = outcomes[contender.name]
            if outcome.error is None:
                take_turn(outcome, contender, _turn(contender, case, options, places), workers)
            bar.advance(task)
    return list(outcomes.values())


def add_plans(outcomes: Sequence[Outcome], case: Case, options: argparse.Namespace) -> None:
    """Add the predicted steps of our contenders."""
    cluster = calibrated_cluster(case.ranks)
    for outcome, contender in zip(outcomes, case.contenders, strict=True):
        if contender.builder == "ours":
            turn = _turn(contender, case, options, ())
            rates = (options.link, options.package_link)
            outcome.planned_seconds = planned_seconds(turn, cluster, *rates)


def take_turn(outcome: Outcome, contender: Contender, turn: Turn, workers: Workers) -> None:
    """Run one turn, and add its measurements or its error to the outcome."""
    try:
        outcome.add(turn, workers.run(contender.builder, turn))
    except (TurnFailedError, ValueError) as error:
        outcome.error = str(error)


def _turn(
    contender: Contender, case: Case, options: argparse.Namespace, places: tuple[str, ...]
) -> Turn:
    """Return the request to a worker; `places` are the network namespaces of the ranks."""
    return Turn(
        contender=contender.name,
        ranks=case.ranks,
        precision=case.precision,
        shape=Shape(
            options.layers, options.hidden, options.heads, options.vocabulary, options.sequence
        ),
        samples=options.samples,
        micro_batches=options.micro_batches,
        warmup=options.warmup,
        steps=options.steps,
        threads=_threads(options, case.ranks),
        ranks_per_node=options.ranks_per_node,
        ranks_per_package=options.ranks_per_package,
        namespaces=places,
        limit_seconds=options.limit,
    )


def _threads(options: argparse.Namespace, ranks: int) -> int:
    return options.threads or max(1, (os.cpu_count() or 1) // ranks)


@contextmanager
def _namespaces_of_ranks(ranks: int, options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Yield the network namespace of each rank; an empty tuple without --link.

    A namespace is a package if there are packages, otherwise a node.
    """
    if options.link is None:
        yield ()
        return
    per_node, per_package = options.ranks_per_node, options.ranks_per_package
    if per_package == 1:
        with namespaces(ranks // per_node, options.link) as nodes:
            yield tuple(nodes[rank // per_node] for rank in range(ranks))
        return
    rate, inner = options.link, Packages(per_node // per_package, options.package_link)
    with namespaces(ranks // per_node, rate, inner) as packages:
        yield tuple(packages[rank // per_package] for rank in range(ranks))


def _progress(status: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    return Progress(*columns, console=status, transient=True, disable=not status.is_terminal)


def _baseline(outcomes: Sequence[Outcome], name: str) -> Outcome:
    """Return the outcome of the contender `name`; if it did not run, the first one that ran."""
    ran = [outcome for outcome in outcomes if outcome.tokens_per_second] or outcomes
    return next((outcome for outcome in ran if outcome.contender == name), ran[0])


def _facts(
    options: argparse.Namespace, compared: Sequence[tuple[Case, list[dict[str, Any]]]]
) -> dict[str, Any]:
    """Return all measurements, the options, and the properties of the machine."""
    return {
        "options": {key: str(value) for key, value in vars(options).items()},
        **machine.about(),
        "load_at_end": os.getloadavg(),
        "cases": [
            {
                "ranks": case.ranks,
                "precision": case.precision,
                "link": options.link,
                "threads": _threads(options, case.ranks),
                "shape": asdict(_turn(case.contenders[0], case, options, ()).shape),
                "rows": rows,
            }
            for case, rows in compared
        ],
    }


if __name__ == "__main__":
    sys.exit(run_command(main))
