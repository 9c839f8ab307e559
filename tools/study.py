"""The study of mT5 as one command (arXiv:2310.05350): models x ZeRO stages x nodes, seconds a step.

`python tools/study.py` plans it for A100 nodes, with the set-ups of conf/experiment/mt5_*;
`--run` trains mt5_tiny on this machine's ranks instead, one run after the other, and measures.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import HORIZONTALS
from rich.table import Table

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontier_llm.config import decode
from frontier_llm.errors import ConfigError, TrainingError
from frontier_llm.planner.candidate import Candidate, ranks_to_plan
from frontier_llm.planner.estimate import estimate
from frontier_llm.telemetry.history import History
from tools.compose import CONF, compose
from tools.console import wide_console
from tools.options import at_least, ending, new_file

MODELS = ("base", "large", "xl", "7b", "xxl")
STAGES = (1, 2, 3)
WARM_UP_STEPS = 3
"""Of a run, whose times do not count."""


@dataclass(frozen=True)
class Cell:
    """One point of the study."""

    model: str
    stage: int
    """Of ZeRO."""
    size: int
    """Nodes of a plan, ranks of a run."""
    seconds: float | None
    """A step; None = refused."""
    reason: str = ""
    """Why it was refused."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan or run, print the table, write what is asked for; return the exit code."""
    options = _parse(arguments)
    console = wide_console()
    cells = []
    for cell in _measured(options) if options.run else _planned(options):
        cells.append(cell)
        if options.run:
            console.print(f"{cell.model} ZeRO-{cell.stage} on {cell.size}: {_words(cell)}")
    unit = "ranks" if options.run else "nodes"
    console.print(table(cells, f"seconds a step, {'measured' if options.run else 'planned'}", unit))
    for cell in cells:
        if cell.reason:
            console.print(f"{cell.model} ZeRO-{cell.stage} on {cell.size} {unit}: {cell.reason}")
    if options.json:
        options.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")
    if options.picture:
        draw(cells, unit, options.picture)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", action="store_true", help="train mt5_tiny here, and measure")
    add = parser.add_argument
    add("--nodes", type=sizes, default="1,2,4,8,16", help="of the plan (default: %(default)s)")
    add("--ranks", type=sizes, default="1,2,4", help="of the runs (default: %(default)s)")
    add("--steps", type=at_least(1), default=10, help="of a run (default: %(default)s)")
    add("--folder", type=Path, default=Path("runs/study"), help="of the runs (%(default)s)")
    add("--json", type=new_file, metavar="FILE", help="write the figures")
    add("--picture", type=new_file, metavar="FILE", help="write an SVG")
    return parser.parse_args(arguments)


def sizes(text: str) -> list[int]:
    """Type of an option: whole numbers above zero, with commas between them."""
    return [at_least(1)(part) for part in text.split(",")]


def _planned(options: argparse.Namespace) -> Iterator[Cell]:
    for model in MODELS:
        for stage in STAGES:
            for nodes in options.nodes:
                yield plan(model, stage, nodes)


def plan(model: str, stage: int, nodes: int) -> Cell:
    """Plan one set-up of the study on another number of nodes, its global batch kept."""
    experiment = f"mt5_{model}_zero{stage}"
    config = decode(compose([f"experiment={experiment}", f"launch.nodes={nodes}"]))
    try:
        judged = estimate(Candidate.of(config, *ranks_to_plan(config)))
    except ConfigError as error:
        return Cell(config.model.name, stage, nodes, None, f"{error.key}: {error.got}")
    refused = judged.refused
    seconds = None if refused else judged.time.seconds
    return Cell(config.model.name, stage, nodes, seconds, refused or "")


def _measured(options: argparse.Namespace) -> Iterator[Cell]:
    for stage in STAGES:
        for ranks in options.ranks:
            yield measure(stage, ranks, options.steps, options.folder)


def measure(stage: int, ranks: int, steps: int, folder: Path) -> Cell:
    """Train mt5_tiny, data parallel, and take the median of the steps after the first ones.

    In fp32, so that no run chooses another precision than the rest; in a new folder below `folder`.

    Raises:
        TrainingError: the run failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run_dir = Path(tempfile.mkdtemp(prefix=f"zero{stage}_{ranks}_", dir=folder)).absolute()
    command = [
        sys.executable, str(CONF.parent / "train.py"), "model=mt5_tiny", "data=stdlib_spans",
        f"sharding=zero{stage}", "parallel.pipeline=1", f"launch.ranks={ranks}", "precision=fp32",
        f"trainer.steps={steps + WARM_UP_STEPS}", "trainer.sample_tokens=0", "checkpoint=off",
        "telemetry.wandb=off", "run.resume=never", f"run.dir={run_dir}",
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise TrainingError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    seconds = History.read(run_dir).column("step_seconds")[WARM_UP_STEPS:]
    return Cell("mt5_tiny", stage, ranks, statistics.median(seconds))


def table(cells: Sequence[Cell], title: str, unit: str) -> Table:
    """Lay the study out: a row for each model and stage, a column for each size."""
    sizes = sorted({cell.size for cell in cells})
    made = Table(title=title, box=HORIZONTALS)
    for column in ("model", "ZeRO", *(f"{size} {unit}" for size in sizes)):
        made.add_column(column, justify="left" if column == "model" else "right")
    for key, row in _rows(cells):
        by_size = {cell.size: cell for cell in row}
        words = (_words(by_size[size]) if size in by_size else "" for size in sizes)
        made.add_row(key[0], str(key[1]), *words)
    return made


def draw(cells: Sequence[Cell], unit: str, path: Path) -> None:
    """Draw seconds a step over sizes: a panel for each model, a line for each stage."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(cell.model for cell in cells))
    figure, axes = pyplot.subplots(
        1, len(models), figsize=(2.6 * len(models) + 1, 3), squeeze=False, layout="constrained"
    )
    for axis, model in zip(axes[0], models, strict=True):
        for (name, stage), row in _rows(cells):
            points = [(cell.size, cell.seconds) for cell in row if cell.seconds is not None]
            if name == model and points:
                axis.plot(*zip(*points, strict=True), marker="o", label=f"ZeRO-{stage}")
        sizes = sorted({cell.size for cell in cells})
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_title(model)
        axis.set_xlabel(unit)
    axes[0][0].set_ylabel("seconds a step")
    axes[0][-1].legend()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _rows(cells: Iterable[Cell]) -> list[tuple[tuple[str, int], list[Cell]]]:
    """Group cells by model and stage, in the order they came."""
    rows: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.model, cell.stage), []).append(cell)
    return list(rows.items())


def _words(cell: Cell) -> str:
    return "refused" if cell.seconds is None else f"{cell.seconds:.3g}"


if __name__ == "__main__":
    sys.exit(ending(main))
