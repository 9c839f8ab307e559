"""Run the example and the study of docs/sweeps.md, and put their results into the page.

    python -m docs.generate.sweeps_page optuna [--page docs/sweeps.md]   12 trials, on this machine
    python -m docs.generate.sweeps_page study [--page docs/sweeps.md]    200 predicted trials

The second command also compares 20 Bayesian with 20 random searches over the same space
(docs/generate/sweep_study.py). Each command prints its block of the page. `--page` also writes the
block into the page, and the charts into the folder `images` beside it.
"""

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from docs.generate import sweep_study
from docs.generate.marked_page import filled
from frontier_llm.cli.options import run_command, tool_parser
from frontier_llm.cli.package_files import CONF
from frontier_llm.cli.sweep_report import (
    draw_convergence,
    draw_pareto,
    sensitivity_table,
    table,
)
from frontier_llm.cli.sweep_trials import Trial, read, read_in_order
from frontier_llm.errors import LaunchError

TINY = (
    "model.hidden=64", "model.heads=4", "data.sequence_length=64", "precision=fp32",
    "trainer.steps=8", "trainer.evaluate_batches=1",
)  # fmt: skip
SMALL = ("parallel.pipeline=1", "data.global_batch=8", *TINY)
EXAMPLES = {
    "optuna": (
        "hydra/sweeper=optuna", "hydra.sweeper.n_trials=12", "hydra.sweeper.sampler.seed=1",
        "data.micro_batch=choice(1,2,3,4)", "parallel.tensor=choice(1,2)",
        "optimizer.learning_rate=choice(1e-3,1e30)", "launch.ranks=2", "model.layers=2",
        "trainer.bad_steps_allowed=1", "optimizer.warmup_steps=0", *SMALL,
    ),
}  # fmt: skip
"""Arguments of train.py. Some trials fail on purpose: a learning rate of 1e30 makes the loss NaN,
and micro-batches of 3 samples do not divide the global batch of 8."""
STUDY = (f"sweep={sweep_study.SWEEP}", "launch.trial_runner=plan")
"""Arguments of the study, which is not among the examples because its table is long."""
SEEDS = 20
"""Number of searches of each kind in the study."""
PICTURES = {"pareto": "speed against memory"}
"""Charts of the first example, with their descriptions."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one example; return the exit code."""
    parser = tool_parser(__doc__)
    parser.add_argument("example", choices=(*EXAMPLES, "study"))
    parser.add_argument("--page", type=Path, help="page whose block is replaced")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/sweep_examples"),
        help="folder of the runs (default %(default)s)",
    )
    chosen = parser.parse_args(arguments)
    folder: Path = chosen.folder.absolute() / chosen.example
    if chosen.example == "study":
        lines = study(folder, chosen.page.parent / "images" if chosen.page else folder)
        return _finish(chosen.example, lines, chosen.page)
    run(chosen.example, folder)
    trials = read(folder)
    lines = block(chosen.example, trials)
    if chosen.page is not None:
        images = chosen.page.parent / "images"
        draw_pareto(trials, images / "sweep_pareto.svg")
    return _finish(chosen.example, lines, chosen.page)


def study(folder: Path, images: Path) -> list[str]:
    """Run the study's sweep and the searches beside it, draw the charts, and return the block.

    Raises:
        LaunchError: the sweep failed, or the same search over the predictions of all settings
            has other trials.
    """
    run("study", folder)
    trials = read_in_order(folder)
    space = sweep_study.Space.of(sweep_study.SWEEP)
    found = sweep_study.searches(space, SEEDS, len(trials))
    if sweep_study.settings(found[sweep_study.BAYESIAN][0]) != sweep_study.settings(trials):
        raise LaunchError("the search over predictions differs from hydra's search: same seed?")
    quantity = trials[0].speed_unit
    draw_convergence(sweep_study.curves(found), quantity, images / "study_convergence.svg")
    return ["", *_command("study"), *sweep_study.block(space, found)]


def _finish(example: str, lines: Sequence[str], page: Path | None) -> int:
    """Print a block, and write it into the page if there is one; return the exit code."""
    if page is not None:
        page.write_text(filled(page.read_text(), {example: lines}))
    print("\n".join(lines))
    return 0


def run(example: str, folder: Path) -> None:
    """Run an example's sweep in a folder.

    Raises:
        LaunchError: the sweep itself failed, not only some of its trials.
    """
    arguments = EXAMPLES.get(example, STUDY)
    command = [sys.executable, "train.py", "-m", *arguments, f"hydra.sweep.dir={folder}"]
    sweep = subprocess.run(command, cwd=CONF.parent, check=False)
    if sweep.returncode:
        raise LaunchError(f"the sweep ended with exit code {sweep.returncode}; see above")


def block(example: str, trials: Sequence[Trial]) -> list[str]:
    """Return the lines of an example's block: the command and the tables of its trials."""
    charts = [f"![{text}](images/sweep_{name}.svg)" for name, text in PICTURES.items()]
    lines = ["", *_command(example), "", *table(trials), ""]
    return [*lines, *sensitivity_table(trials), "", *charts, ""]


def _command(example: str) -> list[str]:
    """Return the lines of an example's command."""
    arguments = EXAMPLES.get(example, STUDY)
    command = textwrap.wrap(
        " ".join(["python train.py -m", *(f"'{w}'" if "(" in w else w for w in arguments)]),
        88, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return ["```bash", *" \\\n".join(command).split("\n"), "```"]


if __name__ == "__main__":
    sys.exit(run_command(main))
