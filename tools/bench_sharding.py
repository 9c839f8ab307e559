"""Compare sharded data parallelism with other libraries: the same GPT on the same ranks.

    python tools/bench_sharding.py                         # 2 and 4 ranks, fp32 and bf16
    python tools/bench_sharding.py --quick                 # does everything run? half a minute
    python tools/bench_sharding.py --deepspeed --ranks 2   # DeepSpeed too, in its own environment
    sudo .venv/bin/python tools/bench_sharding.py --link 1gbit    # a node a rank, shaped links

Contenders, each a set of forked CPU ranks over gloo, take turns: A B C, A B C, ... In a turn its
ranks start, warm up and time some steps. All use AdamW with clipping at 1.0 and the same random
tokens. In bf16 ours, FSDP2 and DeepSpeed send parameters and scattered gradients in bf16; ddp is
autocast over fp32 parameters and sends fp32 gradients.

The table, a row a contender:
    tokens/s     of all ranks together; median over rounds
    of BASELINE  tokens/s over the baseline's of the same round; median over rounds
    idle %       of all cores' time in the timed steps, whoever else used them; median over rounds
    own MiB      what the fullest rank's resident memory grew by from before the model was built
                 to its peak: model, states, buffers, activations
    peak MiB     that peak (ru_maxrss), with the libraries and what ranks share of them
    sent MB      a rank and step, between nodes, by the counters of the network interfaces
    counted MB   the same as frontier_llm counts it (metrics.jsonl's sent_bytes)
MB are millions of bytes. Figures are means over ranks where ranks differ.
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

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from frontier_llm.errors import ConfigError
from tools.bench import deepspeed_venv, machine
from tools.bench.contenders import BY_DEFAULT, DEEPSPEED, Contender, Worker, find
from tools.bench.namespaces import namespaces
from tools.bench.results import Outcome, make_table
from tools.bench.turn import Precision, Shape, Turn
from tools.bench.workers import TurnFailedError, Workers
from tools.console import wide_console
from tools.options import at_least, bench_parser, ending, parse_bench, positive

QUICK = {"layers": 2, "hidden": 64, "heads": 4, "vocabulary": 512, "sequence": 64,
         "ranks": [2], "rounds": 1, "warmup": 1, "steps": 2}  # fmt: skip
NUMBERS = (
    ("steps", 1, 5, "timed steps of a turn"),
    ("warmup", 0, 2, "steps before them"),
    ("micro-batches", 1, 1, "of a rank and step"),
    ("samples", 1, 2, "of a micro-batch"),
    ("layers", 1, 8, "of the model"),
    ("hidden", 1, 512, "elements of a token's state"),
    ("heads", 1, 8, "of attention; they divide --hidden"),
    ("vocabulary", 1, 8192, "rows of the embedding"),
    ("sequence", 1, 256, "tokens of a sample"),
)
"""Options that are numbers: name, the least that makes sense, default, help."""


@dataclass(frozen=True)
class Case:
    """Conditions that are the same for all who are compared."""

    ranks: int
    precision: Precision
    contenders: tuple[Contender, ...]

    def title(self, link: str | None) -> str:
        """Say it in words."""
        return f"{self.ranks} ranks, {self.precision}, {link or 'loopback'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says; return the exit code."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces are removed
    return run(options, wide_console(), wide_console(stderr=True))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = bench_parser(__doc__, rounds=5, quick="a tiny model, 2 ranks, 1 round")
    add = parser.add_argument
    add("--ranks", type=at_least(1), nargs="+", default=[2, 4], metavar="N", help="default 2 4")
    add("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"],
        help="of the computation (default both)")  # fmt: skip
    add("--contenders", nargs="+", metavar="NAME",
        help="default: " + " ".join(BY_DEFAULT) + "; besides: "
        + ", ".join(peer.name for peer in DEEPSPEED) + ", ours-P-G-O for any factors")  # fmt: skip
    add("--deepspeed", action="store_true",
        help=f"compare DeepSpeed too; makes {deepspeed_venv.FOLDER.name} (1 GB) once")  # fmt: skip
    add("--baseline", default="ddp", metavar="NAME", help="of the ratios (default ddp)")
    add("--link", metavar="RATE",
        help="a network namespace a node, with links of this rate (1gbit); needs root")  # fmt: skip
    add("--ranks-per-node", type=at_least(1), default=1, metavar="N",
        help="ranks that share a node (default 1)")  # fmt: skip
    for name, least, default, words in NUMBERS:
        add(f"--{name}", type=at_least(least), default=default, metavar="N",
            help=f"{words} (default {default})")  # fmt: skip
    add("--threads", type=at_least(1), metavar="N",
        help="CPU threads a rank (default: cores / ranks)")  # fmt: skip
    add("--limit", type=positive, default=600, metavar="SECONDS", help="of a turn (default 600)")
    return parse_bench(parser, arguments, QUICK)


def run(options: argparse.Namespace, console: Console, status: Console) -> int:
    """Compare under all conditions asked for; print a table each, write the JSON.

    Raises:
        ConfigError: an option is wrong, or cannot be had on this machine.
    """
    cases = make_cases(options)
    pythons: dict[Worker, Path] = {}
    if any(one.worker == "deepspeed_peer" for case in cases for one in case.contenders):
        pythons["deepspeed_peer"] = deepspeed_venv.ensure(status)
    compared, failed = [], False
    with (
        tempfile.TemporaryDirectory(prefix="bench_sharding_") as folder,
        Workers(Path(folder, "log"), pythons) as workers,
    ):
        for case in cases:
            outcomes = compare(case, options, workers, status)
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
    """Return all conditions, each with those who can take part.

    Raises:
        ConfigError: a contender is unknown, none fits the ranks, or ranks and nodes do not fit.
    """
    names = list(dict.fromkeys(options.contenders or BY_DEFAULT))
    if options.deepspeed:
        names += [peer.name for peer in DEEPSPEED if peer.name not in names]
    contenders = [find(name) for name in names]
    for ranks in options.ranks:
        if ranks % options.ranks_per_node:
            raise ConfigError(
                "--ranks", ranks, f"a multiple of --ranks-per-node={options.ranks_per_node}",
                "change one of them",
            )  # fmt: skip
        if not any(one.fits(ranks) for one in contenders):
            fits = ", ".join(f"{one.name}: multiples of {one.ranks_multiple}" for one in contenders)
            raise ConfigError(
                "--contenders", f"{' '.join(names)} on {ranks} ranks",
                f"one that can take part ({fits})", "change them or --ranks",
            )  # fmt: skip
    return [
        Case(ranks, precision, tuple(one for one in contenders if one.fits(ranks)))
        for ranks in options.ranks
        for precision in options.precision
    ]


def compare(
    case: Case, options: argparse.Namespace, workers: Workers, status: Console
) -> list[Outcome]:
    """Have all contenders of a case take their turns."""
    outcomes = {one.name: Outcome(one.name) for one in case.contenders}
    turns = [(number, one) for number in range(options.rounds) for one in case.contenders]
    with ExitStack() as stack:
        places = stack.enter_context(_places(case.ranks, options))
        bar = stack.enter_context(_progress(status))
        task = bar.add_task(case.title(options.link), total=len(turns), now="")
        for number, one in turns:
            bar.update(task, now=f"round {number + 1}: {one.name}")
            if outcomes[one.name].error is None:
                take_turn(outcomes[one.name], one, _turn(one, case, options, places), workers)
            bar.advance(task)
    return list(outcomes.values())


def take_turn(outcome: Outcome, contender: Contender, turn: Turn, workers: Workers) -> None:
    """Take one turn; a failure is noted, and the others go on."""
    try:
        outcome.add(turn, workers.run(contender.worker, turn))
    except (TurnFailedError, ValueError) as error:
        outcome.error = str(error)


def _turn(
    contender: Contender, case: Case, options: argparse.Namespace, places: tuple[str, ...]
) -> Turn:
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
        namespaces=places,
        limit_seconds=options.limit,
    )


def _threads(options: argparse.Namespace, ranks: int) -> int:
    return options.threads or max(1, (os.cpu_count() or 1) // ranks)


@contextmanager
def _places(ranks: int, options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Give each rank its node's namespace, if links are asked for."""
    if options.link is None:
        yield ()
        return
    per_node = options.ranks_per_node
    with namespaces(ranks // per_node, options.link) as nodes:
        yield tuple(nodes[rank // per_node] for rank in range(ranks))


def _progress(status: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    return Progress(*columns, console=status, transient=True, disable=not status.is_terminal)


def _baseline(outcomes: Sequence[Outcome], name: str) -> Outcome:
    """Return the outcome of that name; without one, the first that took part."""
    ran = [outcome for outcome in outcomes if outcome.tokens_per_second] or outcomes
    return next((outcome for outcome in ran if outcome.contender == name), ran[0])


def _facts(
    options: argparse.Namespace, compared: Sequence[tuple[Case, list[dict[str, Any]]]]
) -> dict[str, Any]:
    """Return all figures, and what must be known to read them."""
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
    sys.exit(ending(main))
