"""Reproduce the study of mT5 (arXiv:2310.05350): seconds per step by model, ZeRO stage and nodes.

    python -m benchmarks.mt5_study                # predict it for A100 nodes (a minute)
    python -m benchmarks.mt5_study --run          # train mt5_tiny on ranks of this machine
    python -m benchmarks.mt5_study --json benchmarks/results/mt5_study.json --picture mt5.svg

Predictions of the planner use the configurations of conf/experiment/mt5_*. With --run, mt5_tiny
trains a few steps for each ZeRO stage and number of ranks, and the median time per step is printed.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import HORIZONTALS
from rich.table import Table

from benchmarks.harness import train_run
from frontier_llm.cli.compose import compose
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import at_least, new_file, run_command, tool_parser
from frontier_llm.config import decode
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate, ranks_to_plan
from frontier_llm.planner.estimate import estimate

MODELS = ("base", "large", "xl", "7b", "xxl")
"""Sizes of the models that are predicted: the names of the experiments after `mt5_`."""
STAGES = (1, 2, 3)
"""Stages of ZeRO."""
WARM_UP_STEPS = 3
"""First steps of a run, which are not counted."""


@dataclass(frozen=True)
class Cell:
    """One configuration of the study and its result: a cell of the table."""

    model: str
    stage: int
    """Stage of ZeRO."""
    size: int
    """Number of nodes of a prediction; number of ranks of a run."""
    seconds: float | None
    """Time per step; None: the configuration was rejected."""
    reason: str = ""
    """Why it was rejected."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict or run, print the table, write JSON and picture; return the exit code."""
    options = _parse(arguments)
    console = wide_console()
    cells = []
    for cell in _measured(options) if options.run else _predicted(options):
        cells.append(cell)
        if options.run:
            console.print(f"{cell.model} ZeRO-{cell.stage} on {cell.size}: {_text(cell)}")
    unit = "ranks" if options.run else "nodes"
    title = f"seconds per step, {'measured' if options.run else 'predicted'}"
    console.print(table(cells, title, unit))
    for cell in cells:
        if cell.reason:
            console.print(f"{cell.model} ZeRO-{cell.stage} on {cell.size} {unit}: {cell.reason}")
    if options.json:
        options.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")
    if options.picture:
        draw(cells, unit, options.picture)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--run", action="store_true", help="train mt5_tiny on this machine")
    add = parser.add_argument
    add("--nodes", type=sizes, default="1,2,4,8,16",
        help="numbers of nodes to predict (default: %(default)s)")  # fmt: skip
    add("--ranks", type=sizes, default="1,2,4",
        help="numbers of ranks of the runs (default: %(default)s)")  # fmt: skip
    add("--steps", type=at_least(1), default=10, help="steps per run (default: %(default)s)")
    add("--folder", type=Path, default=Path("runs/study"), help="folder of the runs (%(default)s)")
    add("--json", type=new_file, metavar="FILE", help="write the results")
    add("--picture", type=new_file, metavar="FILE", help="write an SVG")
    return parser.parse_args(arguments)


def sizes(text: str) -> list[int]:
    """Parse the value of an option: positive integers, separated by commas."""
    return [at_least(1)(part) for part in text.split(",")]


def _predicted(options: argparse.Namespace) -> Iterator[Cell]:
    for model in MODELS:
        for stage in STAGES:
            for nodes in options.nodes:
                yield plan(model, stage, nodes)


def plan(model: str, stage: int, nodes: int) -> Cell:
    """Predict the time per step of an experiment with another ZeRO stage and number of nodes."""
    overrides = [f"experiment=mt5_{model}", f"sharding=zero{stage}", f"launch.nodes={nodes}"]
    config = decode(compose(overrides))
    try:
        prediction = estimate(Candidate.of(config, *ranks_to_plan(config)))
    except ConfigError as error:
        return Cell(config.model.name, stage, nodes, None, f"{error.key}: {error.got}")
    refused = prediction.refused
    seconds = None if refused else prediction.time.seconds
    return Cell(config.model.name, stage, nodes, seconds, refused or "")


def _measured(options: argparse.Namespace) -> Iterator[Cell]:
    for stage in STAGES:
        for ranks in options.ranks:
            yield measure(stage, ranks, options.steps, options.folder)


def measure(stage: int, ranks: int, steps: int, folder: Path) -> Cell:
    """Train mt5_tiny with data parallelism; return the median time per step after the warm-up.

    The precision is fp32 in all runs. Each run has a new folder below `folder`.

    Raises:
        TrainingError: the run failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run_dir = Path(tempfile.mkdtemp(prefix=f"zero{stage}_{ranks}_", dir=folder)).absolute()
    keys = [
        "model=mt5_tiny", "data=stdlib_spans", f"sharding=zero{stage}", "parallel.pipeline=1",
        f"launch.ranks={ranks}", "precision=fp32", f"trainer.steps={steps + WARM_UP_STEPS}",
        "trainer.sample_tokens=0", "checkpoint=off", "telemetry.wandb=off", "run.resume=never",
    ]  # fmt: skip
    seconds = train_run(keys, run_dir).column("step_seconds")[WARM_UP_STEPS:]
    return Cell("mt5_tiny", stage, ranks, statistics.median(seconds))


def table(cells: Sequence[Cell], title: str, unit: str) -> Table:
    """Return a table with one row per model and stage, and one column per size."""
    sizes = sorted({cell.size for cell in cells})
    result = Table(title=title, box=HORIZONTALS)
    for column in ("model", "ZeRO", *(f"{size} {unit}" for size in sizes)):
        result.add_column(column, justify="left" if column == "model" else "right")
    for (model, stage), row in _rows(cells):
        by_size = {cell.size: cell for cell in row}
        texts = (_text(by_size[size]) if size in by_size else "" for size in sizes)
        result.add_row(model, str(stage), *texts)
    return result


def draw(cells: Sequence[Cell], unit: str, path: Path) -> None:
    """Draw seconds per step over sizes: one panel per model, one line per stage."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(cell.model for cell in cells))
    figure, axes = pyplot.subplots(
        1, len(models), figsize=(2.6 * len(models) + 1, 3), squeeze=False, layout="constrained"
    )
    for axis, model in zip(axes[0], models, strict=True):
        for (row_model, stage), row in _rows(cells):
            points = [(cell.size, cell.seconds) for cell in row if cell.seconds is not None]
            if row_model == model and points:
                axis.plot(*zip(*points, strict=True), marker="o", label=f"ZeRO-{stage}")
        sizes = sorted({cell.size for cell in cells})
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_title(model)
        axis.set_xlabel(unit)
    axes[0][0].set_ylabel("seconds per step")
    axes[0][-1].legend()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _rows(cells: Iterable[Cell]) -> list[tuple[tuple[str, int], list[Cell]]]:
    """Group cells by model and stage, in order of their first occurrence."""
    rows: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.model, cell.stage), []).append(cell)
    return list(rows.items())


def _text(cell: Cell) -> str:
    return "rejected" if cell.seconds is None else f"{cell.seconds:.3g}"


if __name__ == "__main__":
    sys.exit(run_command(main))
