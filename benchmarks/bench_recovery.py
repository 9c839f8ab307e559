"""Compare the step time with and without recovery.enabled, while nothing dies.

    python -m benchmarks.bench_recovery                     # 6 rounds, about 4 minutes
    python -m benchmarks.bench_recovery --rounds 3 --json recovery.json
    python -m benchmarks.bench_recovery --copies --rounds 2    # recovery.partner_copies, 8 minutes

Both runs train the same GPT on 4 ranks (pipeline 2 x data 2, optimizer states with a copy). They
alternate, and the first steps of each run are left out. The expected ratio is 1: recovery adds no
communication to a step.

With --copies two ranks, each a node of its own, train a GPT of 19M parameters with 8,192 tokens per
step, and copy 113 MB of states per rank and step. Each byte is written, read, sent, received and
written again by the cores that train. At 2 GB/s for each of these this takes 0.3 s of a core.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.harness import (
    bench_parser,
    compare,
    print_table,
    span,
    spread,
    train_run,
    work_folder,
    write_json,
)
from benchmarks.testbed.forked_run import corpus_of
from frontier_llm.cli.options import run_command

STEPS, SKIPPED = 40, 10
"""Steps of a run, and how many of them are not measured."""
OVERRIDES = (
    "model.layers=4", "model.hidden=128", "model.heads=4", "model.vocabulary=300", "data=text",
    "data.vocabulary=300", "data.sequence_length=128", "data.global_batch=8", "data.micro_batch=1",
    "launch.ranks=4", "parallel.pipeline=2", "precision=fp32", "sharding.params=1",
    "sharding.grads=1", "sharding.optimizer=1", "checkpoint=off", "plan=off", "run.resume=never",
    "trainer.evaluate_every_steps=null", "trainer.evaluate_batches=1", "trainer.sample_tokens=0",
    f"trainer.steps={STEPS}", "telemetry.wandb=off", "telemetry.progress=false",
)  # fmt: skip


COPIES = Path("/dev/shm")
"""Parent of the folder for copies in memory."""
WITH_COPIES = (
    "model.layers=6", "model.hidden=512", "model.heads=8", "data.global_batch=64",
    "data.micro_batch=4", "launch.ranks=2", "launch.ranks_per_node=1", "parallel.pipeline=1",
    "sharding.optimizer=2", "checkpoint=lazy", "checkpoint.every_steps=1000", "trainer.steps=7",
    "launch.threads=1",
)  # fmt: skip
"""A model whose states are long to copy, and a step that is long in proportion."""
SKIPPED_WITH_COPIES = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rounds; return the exit code."""
    parser = bench_parser(__doc__, rounds=6)
    parser.add_argument("--copies", action="store_true", help="measure recovery.partner_copies")
    options = parser.parse_args(arguments)
    key = "recovery.partner_copies" if options.copies else "recovery.enabled"
    with work_folder("bench_recovery") as folder:
        keys = (*OVERRIDES, *corpus_of(folder))
        skipped = SKIPPED_WITH_COPIES if options.copies else SKIPPED

        def turn(enabled: bool) -> float:
            run = folder / f"run_{len(list(folder.iterdir()))}"
            more = _more(run, copies=options.copies, enabled=enabled)
            return median(train_run((*keys, *more), run).column("step_seconds")[skipped:])

        turns = {"true": partial(turn, True), "false": partial(turn, False)}
        on, off = compare(turns, options.rounds).values()
    facts = {"seconds_off": off.rounds, "seconds_on": on.rounds, "ratios": on.ratios(off, float)}
    rows = [
        ["false", span(spread(off.rounds), 1, 1000)],
        ["true", span(spread(on.rounds), 1, 1000)],
        ["ratio of a round", span(spread(facts["ratios"]), 3)],
    ]
    print_table("", [key, "step, ms: median (smallest, largest)"], rows)
    write_json(options, facts)
    return 0


def _more(run: Path, *, copies: bool, enabled: bool) -> tuple[str, ...]:
    """Return the overrides of one contender."""
    value = str(enabled).lower()
    if not copies:
        return (f"recovery.enabled={value}",)
    path = COPIES / run.parent.name
    keys = f"recovery.partner_copies={value}", f"recovery.copies_path={path}"
    return (*WITH_COPIES, "recovery.enabled=true", *keys)


if __name__ == "__main__":
    sys.exit(run_command(main))
