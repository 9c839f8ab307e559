"""Run the examples of docs/sweeps.md, and put their results into the page.

    python -m docs.generate.sweeps_page optuna [--page docs/sweeps.md]   12 trials, on this machine
    python -m docs.generate.sweeps_page slurm [--page docs/sweeps.md]    6 Slurm jobs; as root

The second command starts a Slurm cluster on this machine (benchmarks/faults/slurm_lab/cluster.py
names the packages that it needs). Each command prints its block of the page. `--page` also writes
the block into the page, and the charts of the first example into the folder `images` beside it.
"""

import argparse
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.faults.slurm_lab.cluster import SlurmCluster
from docs.generate.marked_page import filled
from frontier_llm.cli.options import run_command
from frontier_llm.cli.package_files import CONF
from frontier_llm.cli.sweep_charts import draw_pareto, draw_sensitivity
from frontier_llm.cli.sweep_report import sensitivity_table, table
from frontier_llm.cli.sweep_trials import read
from frontier_llm.cli.trial import Trial
from frontier_llm.errors import LaunchError

SMALL = (
    "parallel.pipeline=1", "model.hidden=64", "model.heads=4", "data.sequence_length=64",
    "data.global_batch=8", "precision=fp32", "trainer.steps=8", "trainer.evaluate_batches=1",
)  # fmt: skip
EXAMPLES = {
    "optuna": (
        "hydra/sweeper=optuna", "hydra.sweeper.n_trials=12", "hydra.sweeper.sampler.seed=1",
        "data.micro_batch=choice(1,2,3,4)", "parallel.tensor=choice(1,2)",
        "optimizer.learning_rate=choice(1e-3,1e30)", "launch.ranks=2", "model.layers=2",
        "trainer.bad_steps_allowed=1", "optimizer.warmup_steps=0", *SMALL,
    ),
    "slurm": (
        "hydra/launcher=submitit_slurm", "hydra.launcher.nodes=1",
        "hydra.launcher.tasks_per_node=1", "model.layers=2,4", "data.micro_batch=1,2,3", *SMALL,
    ),
}  # fmt: skip
"""Arguments of train.py. Some trials fail on purpose: a learning rate of 1e30 makes the loss NaN,
and micro-batches of 3 samples do not divide the global batch of 8."""
PICTURES = {"pareto": "speed against memory", "sensitivity": "share of the variance of the speed"}
"""Charts of the first example, with their descriptions."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one example; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("example", choices=tuple(EXAMPLES))
    parser.add_argument("--page", type=Path, help="page whose block is replaced")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/sweep_examples"),
        help="folder of the runs (default %(default)s)",
    )
    chosen = parser.parse_args(arguments)
    folder: Path = chosen.folder.absolute() / chosen.example
    if chosen.example == "optuna":
        run(chosen.example, folder, os.environ)
    else:
        with SlurmCluster(folder.parent / "lab", 2, 4, 2, folder.parent / "local") as cluster:
            run(chosen.example, folder, {"USER": "root", **os.environ, **cluster.environ})
    trials = read(folder)
    lines = block(chosen.example, trials)
    if chosen.page is not None:
        page: Path = chosen.page
        page.write_text(filled(page.read_text(), {chosen.example: lines}))
        if chosen.example == "optuna":
            draw_pareto(trials, page.parent / "images" / "sweep_pareto.svg")
            draw_sensitivity(trials, page.parent / "images" / "sweep_sensitivity.svg")
    print("\n".join(lines))
    return 0


def run(example: str, folder: Path, environ: Mapping[str, str]) -> None:
    """Run an example's sweep in a folder.

    Raises:
        LaunchError: the sweep itself failed, not only some of its trials.
    """
    command = [sys.executable, "train.py", "-m", *EXAMPLES[example], f"hydra.sweep.dir={folder}"]
    sweep = subprocess.run(command, cwd=CONF.parent, env=environ, check=False)
    if sweep.returncode:
        raise LaunchError(f"the sweep ended with exit code {sweep.returncode}; see above")


def block(example: str, trials: Sequence[Trial]) -> list[str]:
    """Return the lines of an example's block: the command and the tables of its trials."""
    arguments = [f"'{word}'" if "(" in word else word for word in EXAMPLES[example]]
    command = textwrap.wrap(
        " ".join(["python train.py -m", *arguments]), 96, subsequent_indent="  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    lines = ["", "```bash", *" \\\n".join(command).split("\n"), "```", "", *table(trials), ""]
    if example == "optuna":
        charts = [f"![{text}](images/sweep_{name}.svg)" for name, text in PICTURES.items()]
        lines += [*sensitivity_table(trials), "", *charts, ""]
    return lines


if __name__ == "__main__":
    sys.exit(run_command(main))
